/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What a program can do wrong, and what it is told. The argument is the address of a volume. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rblk.h>

#define BLOCK 4096
#define DEPTH 4
#define BUFFERS 5

#define CHECK(what)                                                                          \
	do {                                                                                 \
		if (!(what)) {                                                               \
			fprintf(stderr, "line %d: %s; rblk_error: %s\n", __LINE__, #what,    \
				rblk_error());                                               \
			exit(1);                                                             \
		}                                                                            \
	} while (0)

/* The call fails with that errno, and the reason has these words. */
#define REFUSED(call, error, words)                                                          \
	do {                                                                                 \
		CHECK((call) == -(error));                                                   \
		CHECK(strstr(rblk_error(), words));                                          \
	} while (0)

static void null_pointers(void)
{
	struct rblk_options options = RBLK_OPTIONS_INIT;
	struct rblk_status status = { .size = sizeof(status) };
	struct rblk_counts counts = { .size = sizeof(counts) };
	struct rblk_completion done;
	struct rblk_volume *volume;
	struct rblk_queue *queue;

	CHECK(!strcmp(rblk_error(), ""));
	REFUSED(rblk_open(NULL, &volume), EINVAL, "null");
	REFUSED(rblk_open(&options, NULL), EINVAL, "null");
	REFUSED(rblk_volume_status(NULL, &status), EINVAL, "null");
	REFUSED(rblk_queue_create(NULL, &queue), EINVAL, "null");
	REFUSED(rblk_close(NULL), EINVAL, "null");
	REFUSED(rblk_queue_destroy(NULL), EINVAL, "null");
	REFUSED(rblk_queue_depth(NULL), EINVAL, "null");
	REFUSED(rblk_queue_buffers(NULL), EINVAL, "null");
	REFUSED(rblk_queue_buffer_size(NULL), EINVAL, "null");
	CHECK(rblk_queue_buffer(NULL, 0) == NULL);
	REFUSED(rblk_read(NULL, &done, 0, BLOCK, 0), EINVAL, "null");
	REFUSED(rblk_write(NULL, &done, 0, BLOCK, 0, 0), EINVAL, "null");
	REFUSED(rblk_flush(NULL, 0), EINVAL, "null");
	REFUSED(rblk_discard(NULL, 0, BLOCK, 0), EINVAL, "null");
	REFUSED(rblk_write_zeroes(NULL, 0, BLOCK, 0, 0), EINVAL, "null");
	REFUSED(rblk_poll(NULL, &done, 1), EINVAL, "null");
	REFUSED(rblk_wait(NULL, &done, 1, 1), EINVAL, "null");
	REFUSED(rblk_event_fd(NULL), EINVAL, "null");
	REFUSED(rblk_arm(NULL), EINVAL, "null");
	REFUSED(rblk_queue_counts(NULL, &counts), EINVAL, "null");
}

static void wrong_options(const char *uri)
{
	struct rblk_options options = RBLK_OPTIONS_INIT;
	struct rblk_volume *volume = (struct rblk_volume *)&options;

	REFUSED(rblk_open(&options, &volume), EINVAL, "target");
	CHECK(volume == NULL);
	options.uri = "store1/vol0";
	REFUSED(rblk_open(&options, &volume), EINVAL, "rdma://HOST/VOLUME");
	options.uri = uri;
	options.settings = "queue_deep = 4";
	REFUSED(rblk_open(&options, &volume), EINVAL, "queue_deep");
	options.settings = NULL;
	options.max_io = 5000;
	REFUSED(rblk_open(&options, &volume), EINVAL, "max_io");
	options.max_io = 0;
	options.flags = 1u << 31;
	REFUSED(rblk_open(&options, &volume), ENOTSUP, "does not know");
	options.flags = 0;
	options.size = 0;
	REFUSED(rblk_open(&options, &volume), EINVAL, "size");
	options.size = sizeof(options);
	options.uri = "tcp://127.0.0.1:1/v";
	REFUSED(rblk_open(&options, &volume), EAGAIN, "127.0.0.1:1");
}

static int take(struct rblk_queue *queue, struct rblk_completion *done, int most)
{
	int tries, count = 0;

	for (tries = 0; tries < 20 && count == 0; tries++)
		count = rblk_wait(queue, done, most, 1000);
	CHECK(count > 0);
	return count;
}

static void wrong_requests(struct rblk_queue *queue, struct rblk_queue *other)
{
	char *buffer = rblk_queue_buffer(queue, 0);
	struct rblk_completion done[DEPTH];
	int i, count;

	CHECK(rblk_queue_depth(queue) == DEPTH && rblk_queue_buffers(queue) == BUFFERS);
	CHECK(buffer && (uintptr_t)buffer % 4096 == 0);
	CHECK(rblk_queue_buffer_size(queue) == 16 * BLOCK);
	CHECK(!rblk_queue_buffer(queue, BUFFERS) && !rblk_queue_buffer(queue, -1));
	REFUSED(rblk_read(queue, NULL, 0, BLOCK, 0), EINVAL, "buffer of this queue");
	REFUSED(rblk_read(queue, buffer + 1, 0, BLOCK, 0), EINVAL, "buffer of this queue");
	REFUSED(rblk_read(queue, buffer - BLOCK, 0, BLOCK, 0), EINVAL, "buffer of this queue");
	REFUSED(rblk_read(queue, done, 0, BLOCK, 0), EINVAL, "buffer of this queue");
	REFUSED(rblk_read(queue, rblk_queue_buffer(other, 0), 0, BLOCK, 0), EINVAL, "this queue");
	REFUSED(rblk_read(queue, buffer, 0, 0, 0), EINVAL, "0 bytes");
	REFUSED(rblk_read(queue, buffer, 1, BLOCK, 0), EINVAL, "whole blocks");
	REFUSED(rblk_read(queue, buffer, 0, SIZE_MAX, 0), EINVAL, "more than");
	REFUSED(rblk_write(queue, buffer, 0, 17 * BLOCK, 0, 0), EINVAL, "more than");
	REFUSED(rblk_write(queue, buffer, 0, BLOCK, 2, 0), ENOTSUP, "flag");
	REFUSED(rblk_write_zeroes(queue, 0, BLOCK, 2, 0), ENOTSUP, "flag");
	REFUSED(rblk_poll(queue, done, -1), EINVAL, "negative");
	REFUSED(rblk_poll(queue, NULL, 1), EINVAL, "null");
	REFUSED(rblk_wait(queue, done, 1, -1), EINVAL, "negative");
	CHECK(rblk_poll(queue, NULL, 0) == 0 && rblk_poll(queue, done, DEPTH) == 0);

	/* The same buffer twice; as many requests as there is room for; completions one by one. */
	CHECK(rblk_write(queue, buffer, 0, BLOCK, RBLK_DURABLE, 0) == 0);
	REFUSED(rblk_write(queue, buffer, BLOCK, BLOCK, 0, 0), EBUSY, "under way");
	for (i = 1; i < DEPTH; i++)
		CHECK(rblk_read(queue, rblk_queue_buffer(queue, i), 0, BLOCK, (uint64_t)i) == 0);
	REFUSED(rblk_flush(queue, 9), EAGAIN, "deep");
	CHECK(take(queue, done, 1) == 1 && done[0].result == BLOCK);
	CHECK(done[0].buffer == rblk_queue_buffer(queue, (int)done[0].user_data));
	/* The place of the one that was told is free, and no other. */
	CHECK(rblk_flush(queue, 9) == 0);
	REFUSED(rblk_flush(queue, 9), EAGAIN, "deep");
	for (count = 0; count < DEPTH; count++) {
		CHECK(take(queue, done, 1) == 1);
		if (done[0].user_data == 9)
			CHECK(done[0].result == 0 && done[0].buffer == NULL);
		else
			CHECK(done[0].result == BLOCK && done[0].buffer != NULL);
	}
	CHECK(rblk_poll(queue, done, DEPTH) == 0);

	/* Beyond the end: the target says so. The buffer comes back. */
	CHECK(rblk_read(queue, buffer, 1ull << 40, BLOCK, 1) == 0);
	CHECK(take(queue, done, DEPTH) == 1 && done[0].result < 0 && done[0].buffer == buffer);
}

static void sleep_in_the_descriptor(struct rblk_queue *queue)
{
	struct rblk_completion done;
	struct pollfd fd = { .events = POLLIN };
	int rounds, longest;

	fd.fd = rblk_event_fd(queue);
	CHECK(fd.fd >= 0);
	CHECK(rblk_read(queue, rblk_queue_buffer(queue, 0), 0, BLOCK, 3) == 0);
	for (rounds = 0; rblk_poll(queue, &done, 1) == 0; rounds++) {
		CHECK(rounds < 1000);
		longest = rblk_arm(queue);
		CHECK(longest >= 0);
		if (longest > 0)
			CHECK(poll(&fd, 1, longest) >= 0);
	}
	CHECK(done.user_data == 3 && done.result == BLOCK);
}

static void *wait_long(void *queue)
{
	struct rblk_completion done;
	int count;

	/* The other thread may be inside, too. */
	while ((count = rblk_wait(queue, &done, 1, 2000)) == -EBUSY)
		usleep(100);
	CHECK(count == 0);
	return NULL;
}

static void two_threads_in_a_queue(struct rblk_queue *queue)
{
	struct rblk_completion done;
	pthread_t thread;
	int count = 0, tries;

	CHECK(pthread_create(&thread, NULL, wait_long, queue) == 0);
	for (tries = 0; tries < 20000 && count != -EBUSY; tries++) {
		usleep(500);
		count = rblk_poll(queue, &done, 1);
	}
	CHECK(count == -EBUSY && strstr(rblk_error(), "another thread"));
	REFUSED(rblk_queue_destroy(queue), EBUSY, "another thread");
	CHECK(pthread_join(thread, NULL) == 0);
}

static void handles_that_are_closed(struct rblk_volume *volume, struct rblk_queue *queue)
{
	struct rblk_status status = { .size = sizeof(status) };
	struct rblk_queue *none;

	CHECK(rblk_volume_status(volume, &status) == 0);
	CHECK(status.block_size > 0 && status.state == RBLK_CONNECTED && !status.read_only);
	CHECK(status.size_bytes == 4 << 20 && status.max_io == 16 * BLOCK);
	status.size = 0;
	REFUSED(rblk_volume_status(volume, &status), EINVAL, "size");
	REFUSED(rblk_volume_status(volume, NULL), EINVAL, "null");
	REFUSED(rblk_queue_create(volume, &none), ENOENT, "given out");
	CHECK(none == NULL);
	CHECK(rblk_queue_destroy(queue) == 0);
	REFUSED(rblk_queue_destroy(queue), EBADF, "closed");
	REFUSED(rblk_flush(queue, 0), EBADF, "closed");
	CHECK(rblk_close(volume) == 0);
	REFUSED(rblk_close(volume), EBADF, "closed");
	REFUSED(rblk_volume_status(volume, &status), EBADF, "closed");
}

int main(int argc, char **argv)
{
	struct rblk_options options = RBLK_OPTIONS_INIT;
	struct rblk_counts counts = { .size = sizeof(counts) };
	struct rblk_queue *queue, *other;
	struct rblk_volume *volume;

	CHECK(argc == 2);
	null_pointers();
	wrong_options(argv[1]);
	options.uri = argv[1];
	options.settings = "queue_depth = 9\nspin = '20us'";
	options.queues = 2;
	options.queue_depth = DEPTH;
	options.spare_buffers = BUFFERS - DEPTH;
	options.max_io = 16 * BLOCK;
	CHECK(rblk_open(&options, &volume) == 0);
	CHECK(rblk_queue_create(volume, &queue) == 0 && rblk_queue_create(volume, &other) == 0);
	wrong_requests(queue, other);
	sleep_in_the_descriptor(queue);
	two_threads_in_a_queue(queue);
	CHECK(rblk_queue_counts(queue, &counts) == 0);
	CHECK(counts.size == sizeof(counts) && counts.answered == 7 && counts.errors == 1);
	CHECK(counts.copied_bytes == 0 && counts.written_bytes == BLOCK);
	CHECK(rblk_queue_destroy(other) == 0);
	handles_that_are_closed(volume, queue);
	return 0;
}
