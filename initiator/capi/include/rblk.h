/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * librblk: volumes of rblk for programs, without a block device. There is no kernel between the
 * program and the network card, and no copy of the data. docs/library.md explains the use,
 * examples/copy.c is an example.
 *
 * Results. A function returns a negative errno when it fails. rblk_error() has the reason in plain
 * words. -EINVAL is a mistake of the program, -EBADF a handle that was closed before, -ENOTSUP
 * something that only a later version of the library knows, -EIO a volume or queue that cannot go
 * on: destroy its queues, close it and open it again. The loss of the target is no such error:
 * requests wait.
 *
 * Threads. A volume may be used by any threads at the same time. A queue may be used by one thread
 * at a time; another one gets -EBUSY. Each thread should have a queue of its own: queues share no
 * lock. A queue works inside rblk_poll and rblk_wait only. One that is left alone for more than
 * 10 s keeps its volume from a target that was restarted: destroy queues that are not needed.
 *
 * Processes. A child of fork must not use what its parent opened. It may open volumes itself, if
 * it calls exec, or if the parent had none open when it forked.
 *
 * Pointers. A handle is null or what this library gave. The library notices null, handles that were
 * closed, and buffers that are not the queue's. It cannot notice other wrong addresses.
 *
 * Unloading. dlclose must not unload the library while a volume is open. The shared library is
 * linked so that it never is.
 */
#ifndef RBLK_H
#define RBLK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open volume. */
struct rblk_volume;

/* One thread's way to a volume: buffers, requests and completions. */
struct rblk_queue;

/*
 * How a volume is to be opened. Begin with RBLK_OPTIONS_INIT, so that later versions of the
 * structure do not matter. What is 0 or null is left as it is. Texts are UTF-8.
 */
struct rblk_options {
	size_t size;          /* sizeof(struct rblk_options) */
	const char *uri;      /* "rdma://HOST/VOLUME" or "tcp://HOST:PORT/VOLUME", over the files */
	const char *config;   /* path of a file as in mounts.d: docs/keys.md */
	const char *settings; /* lines of such a file, over those of the file */
	const uint8_t *host_id; /* 16 bytes: the id of this program at the target, if not the host's */
	uint64_t max_io;      /* the most data of one request: a power of 2 */
	uint32_t flags;       /* RBLK_TAKE_OVER */
	uint16_t queues;      /* 1 if nobody says how many */
	uint16_t queue_depth; /* requests at once, of each queue */
	uint16_t spare_buffers; /* buffers of each queue beyond its depth */
	uint16_t reserved[3]; /* 0 */
};

#define RBLK_OPTIONS_INIT { .size = sizeof(struct rblk_options) }

/* Fence the host that holds the volume. */
#define RBLK_TAKE_OVER 1u

/* A write is durable when it is completed. */
#define RBLK_DURABLE 1u

/* The space of a range of zeros stays allocated. */
#define RBLK_KEEP_ALLOCATED 1u

/* Where a volume stands. */
enum rblk_state {
	RBLK_CONNECTED = 0,    /* requests are served */
	RBLK_RECONNECTING = 1, /* the target is lost and tried again: requests wait */
	RBLK_FAILING = 2,      /* the same for longer than fail_after: requests fail */
	RBLK_REMOVED = 3,      /* the target has removed the volume: requests fail */
	RBLK_FENCED = 4,       /* another host has the volume now: requests fail, permanently */
	RBLK_CHANGED = 5       /* the target has another volume of that name: they fail, permanently */
};

/* How a volume is. Set size to sizeof(struct rblk_status). The library sets it to how much of the
 * structure it filled: an older library fills less. */
struct rblk_status {
	size_t size;
	uint64_t size_bytes;       /* the target can change it */
	uint64_t unflushed_writes; /* completed writes that no flush has covered */
	uint64_t losses;           /* how often the target lost such writes */
	uint64_t max_io;           /* the most data of one request */
	uint32_t block_size;       /* ranges of requests are whole blocks */
	uint32_t state;            /* enum rblk_state. Later versions may have more */
	uint32_t read_only;        /* not 0: it refuses writes. The target can change it */
	uint32_t reserved;
};

/* How a request ended. */
struct rblk_completion {
	uint64_t user_data; /* of the request */
	int64_t result;     /* bytes that were read or written, 0 for other requests; or -errno */
	void *buffer;       /* of a read or a write. It is the program's again */
};

/* What a queue has counted. Set size to sizeof(struct rblk_counts), as for struct rblk_status. */
struct rblk_counts {
	size_t size;
	uint64_t answered;      /* requests that were answered, well or not */
	uint64_t errors;        /* of those, the ones that failed */
	uint64_t read_bytes;
	uint64_t written_bytes;
	uint64_t copied_bytes;  /* by the library, between buffers: 0 without the setting retain */
	uint64_t sent_again;    /* requests, because their connection died */
	uint64_t paths_lost;    /* connections that ended */
	uint64_t sleeps;        /* of rblk_wait */
};

/*
 * The reason why the last call of this thread that failed did so, in plain words; "" if none did.
 * The text is valid until the next call of this thread fails, or the thread ends.
 */
const char *rblk_error(void);

/* The version of the library. */
const char *rblk_version(void);

/*
 * Opens a volume. It blocks until the target answers, at most as long as the settings
 * connect_timeout and wait say, and half a minute more for each address.
 * -EAGAIN: trying again later can help. -EIO: not. -EINVAL: the options are wrong.
 */
int rblk_open(const struct rblk_options *options, struct rblk_volume **volume);

/* Tells how a volume is. */
int rblk_volume_status(struct rblk_volume *volume, struct rblk_status *status);

/*
 * Gives the next queue of a volume. -ENOENT: all are given out. A volume has as many as its options
 * say; take all of them.
 */
int rblk_queue_create(struct rblk_volume *volume, struct rblk_queue **queue);

/*
 * Closes a volume, and waits until the target has heard of it. What has to be durable has to be
 * flushed before, and its queues destroyed.
 * -ETIMEDOUT: a queue is in use, or the target does not answer. It is closed, and the session ends
 * by itself. -EBUSY: another thread is inside a call with it. It is not closed. A handle that was
 * closed may be the next one that is given: nobody must use it any more.
 */
int rblk_close(struct rblk_volume *volume);

/*
 * Destroys a queue. Requests under way are given up: no completion tells what became of them, and a
 * write may still be done later. The queue's buffers must not be used any more.
 * -EBUSY: another thread is inside a call with it. It is not destroyed.
 */
int rblk_queue_destroy(struct rblk_queue *queue);

/* Requests that the queue takes at once. */
int rblk_queue_depth(struct rblk_queue *queue);

/* Buffers of the queue: its depth, and the spare ones. */
int rblk_queue_buffers(struct rblk_queue *queue);

/* Bytes of each buffer: the most data of one request. */
int64_t rblk_queue_buffer_size(struct rblk_queue *queue);

/*
 * Buffer `number` of the queue, from 0 on; null if there is none of that number. It is registered
 * memory that begins at a multiple of 4096. The card moves data to and from it. Which buffers are in
 * use is the program's matter. While a buffer is in a request, the program must not write to it,
 * and what it reads there is not defined.
 */
void *rblk_queue_buffer(struct rblk_queue *queue, int number);

/*
 * Requests. `buffer` is from rblk_queue_buffer, of the same queue, and is not in another request:
 * -EBUSY. `offset` and `len` are bytes, whole blocks of the volume. A request is sent with the next
 * rblk_poll or rblk_wait. Requests under way at the same time have no order. A request without an
 * answer does not time out unless the setting fail_after says so.
 * -EAGAIN: as many requests as the queue is deep are under way, or their completions not told yet.
 */
int rblk_read(struct rblk_queue *queue, void *buffer, uint64_t offset, size_t len,
	      uint64_t user_data);
int rblk_write(struct rblk_queue *queue, const void *buffer, uint64_t offset, size_t len,
	       uint32_t flags, uint64_t user_data);

/*
 * Makes durable every write, of any queue of the volume, whose completion was told before this is
 * submitted.
 */
int rblk_flush(struct rblk_queue *queue, uint64_t user_data);

/* The data of a range is not needed any more. */
int rblk_discard(struct rblk_queue *queue, uint64_t offset, uint64_t len, uint64_t user_data);

/* Zeroes a range. The store may give its space back unless RBLK_KEEP_ALLOCATED says not to. */
int rblk_write_zeroes(struct rblk_queue *queue, uint64_t offset, uint64_t len, uint32_t flags,
		      uint64_t user_data);

/*
 * Sends what was submitted, and takes what has come, without sleeping. Returns how many completions
 * it wrote, at most `most`. The rest is kept for the next call. `most` may be 0: it only sends.
 */
int rblk_poll(struct rblk_queue *queue, struct rblk_completion *completions, int most);

/*
 * The same, and waits for completions if there are none, at most `longest_ms` milliseconds. It looks
 * for them as long as the setting spin says, and then sleeps. Returns 0 when the time was over first.
 */
int rblk_wait(struct rblk_queue *queue, struct rblk_completion *completions, int most,
	      int longest_ms);

/* A descriptor to sleep in among others, by poll or epoll. Do not read or close it. */
int rblk_event_fd(struct rblk_queue *queue);

/*
 * Asks for the descriptor to be readable when something comes; needed before each sleep. Returns for
 * how many milliseconds the program may sleep at most, after which it has to call rblk_poll, readable
 * or not. 0 says that rblk_poll is due now.
 */
int rblk_arm(struct rblk_queue *queue);

/* Tells what a queue has counted. */
int rblk_queue_counts(struct rblk_queue *queue, struct rblk_counts *counts);

#ifdef __cplusplus
}
#endif

#endif
