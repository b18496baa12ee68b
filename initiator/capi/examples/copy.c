/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Copies a file to a volume, or a volume to a file, with as many requests at once as the queue
 * takes:
 *
 *     cc copy.c -o copy $(pkg-config --cflags --libs rblk)
 *     ./copy disk.img rdma://store1/vol0
 *     ./copy tcp://store1:4421/vol0 disk.img
 *
 * The end of a file that is no whole block is filled with zeros on the volume.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <rblk.h>

#define EVENTS 64

struct job {
	struct rblk_queue *queue;
	int file;
	int to_volume;
	uint64_t file_bytes;  /* of the file, when it is copied to the volume */
	uint64_t bytes;       /* to copy, whole blocks */
	uint64_t next;        /* the first byte that no request has */
	size_t piece;         /* bytes of a request */
	uint64_t *offsets;    /* of the requests, by buffer */
	int free_buffers;
	int *free;            /* numbers of buffers */
};

static int fail(const char *what)
{
	fprintf(stderr, "copy: %s: %s\n", what, rblk_error());
	return -1;
}

static size_t min(uint64_t a, size_t b)
{
	return a < b ? (size_t)a : b;
}

/* Reads or writes all of it. */
static int file_io(struct job *job, char *data, size_t len, uint64_t offset)
{
	while (len > 0) {
		ssize_t done = job->to_volume ? pread(job->file, data, len, (off_t)offset)
					      : pwrite(job->file, data, len, (off_t)offset);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0) {
			fprintf(stderr, "copy: the file: %s\n", done ? strerror(errno) : "it is shorter now");
			return -1;
		}
		data += done;
		len -= (size_t)done;
		offset += (uint64_t)done;
	}
	return 0;
}

/* Submits one piece. The number of its buffer is its user data. */
static int submit(struct job *job)
{
	int number = job->free[--job->free_buffers];
	char *data = rblk_queue_buffer(job->queue, number);
	size_t len = min(job->bytes - job->next, job->piece);
	uint64_t offset = job->next;
	int failed;

	if (!data)
		return fail("no buffer");
	job->offsets[number] = offset;
	job->next += len;
	if (job->to_volume) {
		size_t in_file = offset < job->file_bytes ? min(job->file_bytes - offset, len) : 0;

		if (file_io(job, data, in_file, offset))
			return -1;
		memset(data + in_file, 0, len - in_file);
		failed = rblk_write(job->queue, data, offset, len, 0, (uint64_t)number);
	} else {
		failed = rblk_read(job->queue, data, offset, len, (uint64_t)number);
	}
	return failed ? fail("a request was refused") : 0;
}

/* One request has ended. */
static int finish(struct job *job, const struct rblk_completion *done)
{
	int number = (int)done->user_data;

	if (done->result < 0) {
		fprintf(stderr, "copy: the volume: %s\n", strerror((int)-done->result));
		return -1;
	}
	if (!job->to_volume &&
	    file_io(job, done->buffer, (size_t)done->result, job->offsets[number]))
		return -1;
	job->free[job->free_buffers++] = number;
	return 0;
}

static int copy(struct job *job)
{
	struct rblk_completion done[EVENTS];
	int all = job->free_buffers, count, i;

	while (job->next < job->bytes || job->free_buffers < all) {
		while (job->next < job->bytes && job->free_buffers > 0)
			if (submit(job))
				return -1;
		/* While the target is lost, this waits for it. */
		count = rblk_wait(job->queue, done, EVENTS, 1000);
		if (count < 0)
			return fail("the queue broke");
		for (i = 0; i < count; i++)
			if (finish(job, &done[i]))
				return -1;
	}
	if (!job->to_volume)
		return fsync(job->file);
	if (rblk_flush(job->queue, 0))
		return fail("a flush was refused");
	while ((count = rblk_wait(job->queue, done, 1, 1000)) == 0)
		;
	if (count < 0)
		return fail("the queue broke");
	if (done[0].result < 0) {
		fprintf(stderr, "copy: the flush: %s\n", strerror((int)-done[0].result));
		return -1;
	}
	return 0;
}

static int run(struct job *job, struct rblk_volume *volume, const char *path)
{
	struct rblk_status status = { .size = sizeof(status) };
	struct stat file;
	int i, result;

	if (rblk_volume_status(volume, &status) || rblk_queue_create(volume, &job->queue))
		return fail("the volume");
	job->file = job->to_volume ? open(path, O_RDONLY)
				   : open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (job->file < 0 || fstat(job->file, &file)) {
		perror(path);
		return -1;
	}
	job->bytes = status.size_bytes;
	if (job->to_volume) {
		job->file_bytes = (uint64_t)file.st_size;
		job->bytes = job->file_bytes + status.block_size - 1;
		job->bytes -= job->bytes % status.block_size;
	}
	if (job->bytes > status.size_bytes) {
		fprintf(stderr, "copy: the file is larger than the volume\n");
		return -1;
	}
	job->piece = (size_t)rblk_queue_buffer_size(job->queue);
	job->free_buffers = rblk_queue_buffers(job->queue);
	job->offsets = calloc((size_t)job->free_buffers, sizeof(*job->offsets));
	job->free = calloc((size_t)job->free_buffers, sizeof(*job->free));
	if (!job->offsets || !job->free) {
		perror("copy");
		return -1;
	}
	for (i = 0; i < job->free_buffers; i++)
		job->free[i] = i;
	result = copy(job);
	if (rblk_queue_destroy(job->queue) || close(job->file))
		result = fail("the end");
	return result;
}

int main(int argc, char **argv)
{
	struct rblk_options options = RBLK_OPTIONS_INIT;
	struct rblk_volume *volume;
	struct job job = { .file = -1 };
	int result;

	if (argc != 3) {
		fprintf(stderr, "usage: copy FILE URI, or copy URI FILE (librblk %s)\n", rblk_version());
		return 2;
	}
	job.to_volume = strstr(argv[2], "://") != NULL;
	options.uri = argv[job.to_volume ? 2 : 1];
	if (rblk_open(&options, &volume))
		return fail(options.uri) ? 1 : 0;
	result = run(&job, volume, argv[job.to_volume ? 1 : 2]);
	if (rblk_close(volume))
		result = fail("close");
	free(job.offsets);
	free(job.free);
	return result ? 1 : 0;
}
