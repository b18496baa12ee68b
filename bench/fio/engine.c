/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An I/O engine for fio: volumes of rblk by librblk, without a block device.
 *
 * This source is under the licence of rblk. It is compiled against the headers of fio, which are
 * under the GPL version 2: what comes out of that may be distributed under the GPL version 2 only.
 * rblk distributes no such binary; `cargo xtask fio-engine` makes one where it is run.
 *
 *     fio --ioengine=external:PATH/librblk_fio.so --thread --filename='rdma\://HOST/VOLUME' ...
 *
 * Each job has a queue of its own. The jobs that run at the same time share the volume, because a
 * host opens a volume once: so they have to be threads. fio's buffers are those of the queue: what
 * fio fills is what the card reads.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fio.h"
#include "optgroup.h"

#include <rblk.h>

/* What requests may carry at least. */
#define MAX_IO_LEAST 4096u
/* How long one sleep for completions takes at most. */
#define SLEEP_MS 1000
/* So many units, or so many bytes, wait for those that follow at once. A message holds 16
 * commands. */
#define UNSENT_MOST 16u
#define UNSENT_BYTES_MOST (64u << 10)

struct options {
	void *pad; /* fio takes an offset of 0 for no offset */
	char *config;
	char *key_file;
	char *target_key;
	unsigned int take_over;
	unsigned int sleep;
};

static struct fio_option options[] = {
	{
		.name = "rblk_config",
		.lname = "Configuration of rblk",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, config),
		.help = "A file as in mounts.d. filename, iodepth and bs are stronger",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "rblk_key_file",
		.lname = "Key of this host",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, key_file),
		.help = "The file of the secret key of this host",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "rblk_target_key",
		.lname = "Key of the target",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, target_key),
		.help = "The key that the target has to prove",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "rblk_take_over",
		.lname = "Take over",
		.type = FIO_OPT_STR_SET,
		.off1 = offsetof(struct options, take_over),
		.help = "Fence the host that holds the volume",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "rblk_sleep",
		.lname = "Sleep",
		.type = FIO_OPT_STR_SET,
		.off1 = offsetof(struct options, sleep),
		.help = "Sleep for completions, as `spin` of the configuration says, and do not poll",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{ .name = NULL },
};

/* A volume that jobs share. */
struct shared {
	struct shared *next;
	char *name;
	struct rblk_volume *volume; /* while there are users */
	char opened_with[2 * PATH_MAX]; /* the options of the job that opened it */
	unsigned int users;
	unsigned int block_size;
	uint64_t bytes;
};

/* What a job has. */
struct job {
	struct shared *shared;
	struct rblk_queue *queue;
	/* Completions of the last looks. fio was told of those before `told`: of those from `given`
	 * on the last time. */
	struct rblk_completion *done;
	unsigned int given, told, got;
	unsigned int depth;
	unsigned int unsent;
	uint64_t unsent_bytes;
	bool gathers;
	bool sleep;
};

/* What the jobs that run beside a job need of a volume. */
struct needs {
	unsigned int queues;
	unsigned int depth;
	uint64_t max_io;
};

/* Which volume a job has. fio frees the names of a job's files when the job ends, while others still
 * begin, so the engine keeps its own note of each. */
struct plan {
	struct plan *next;
	unsigned int thread_number;
	struct shared *shared;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *volumes;
static struct plan *plans;

struct ioengine_ops ioengine;

static const char *name_of(struct thread_data *td)
{
	return td->files[0]->file_name;
}

/* The lock is held. */
static int make_plan(struct thread_data *td, struct shared *shared)
{
	struct plan *plan = calloc(1, sizeof(*plan));

	if (!plan)
		return ENOMEM;
	plan->thread_number = td->thread_number;
	plan->shared = shared;
	plan->next = plans;
	plans = plan;
	return 0;
}

/* The lock is held. */
static bool is_planned(struct thread_data *td, struct shared *shared)
{
	struct plan *plan;

	for (plan = plans; plan; plan = plan->next)
		if (plan->thread_number == td->thread_number && plan->shared == shared)
			return true;
	return false;
}

/* Adds up what the jobs of this volume need that run at the same time as this one. A job with
 * stonewall begins when all earlier ones have ended. The lock is held. */
static struct needs needs_of(struct thread_data *own, struct shared *shared)
{
	struct needs needs = { 0, 0, MAX_IO_LEAST };
	struct thread_data *td;
	int i, first = 0, last = (int)thread_number;

	for_each_td(td, i) {
		if (!td->o.stonewall)
			continue;
		if (i < (int)own->thread_number)
			first = i;
		else if (i < last)
			last = i;
	}
	for_each_td(td, i) {
		if (i < first || i >= last || !is_planned(td, shared))
			continue;
		needs.queues++;
		if (td->o.iodepth > needs.depth)
			needs.depth = td->o.iodepth;
		while (needs.max_io < td_max_bs(td))
			needs.max_io *= 2;
	}
	return needs;
}

/* Adds a line `name = 'value'`. */
static int add_setting(char *settings, size_t len, const char *format, const char *value)
{
	size_t used = strlen(settings);

	if (!value)
		return 0;
	if (strchr(value, '\'') || strchr(value, '\n')) {
		log_err("rblk: %s: quotes are not allowed\n", value);
		return EINVAL;
	}
	if (snprintf(settings + used, len - used, format, value) >= (int)(len - used)) {
		log_err("rblk: %s: too long\n", value);
		return EINVAL;
	}
	return 0;
}

static int open_volume(struct thread_data *td, struct needs needs, struct rblk_volume **volume)
{
	struct options *given = td->eo;
	struct rblk_options options = RBLK_OPTIONS_INIT;
	char settings[2 * PATH_MAX + 256] = "";
	int error;

	if (needs.queues > UINT16_MAX || needs.depth > UINT16_MAX) {
		log_err("rblk: too many jobs, or iodepth is too large\n");
		return EINVAL;
	}
	error = add_setting(settings, sizeof(settings), "key_file = '%s'\n", given->key_file);
	if (!error)
		error = add_setting(settings, sizeof(settings), "target_keys = ['%s']\n",
				    given->target_key);
	if (error)
		return error;
	options.uri = name_of(td);
	options.config = given->config;
	options.settings = settings;
	options.queues = (uint16_t)needs.queues;
	options.queue_depth = (uint16_t)needs.depth;
	options.max_io = needs.max_io;
	options.flags = given->take_over ? RBLK_TAKE_OVER : 0;
	error = -rblk_open(&options, volume);
	if (error)
		log_err("rblk: %s: %s\n", name_of(td), rblk_error());
	return error;
}

/* The volume of that name, which may not be open. The lock is held. */
static struct shared *find_shared(const char *name)
{
	struct shared *shared;

	for (shared = volumes; shared; shared = shared->next)
		if (!strcmp(shared->name, name))
			return shared;
	shared = calloc(1, sizeof(*shared));
	if (!shared)
		return NULL;
	shared->name = strdup(name);
	if (!shared->name) {
		free(shared);
		return NULL;
	}
	shared->next = volumes;
	volumes = shared;
	return shared;
}

static int learn_size(struct shared *shared, struct rblk_volume *volume)
{
	struct rblk_status status = { .size = sizeof(status) };
	int error = -rblk_volume_status(volume, &status);

	if (error) {
		log_err("rblk: %s: %s\n", shared->name, rblk_error());
		return error;
	}
	shared->bytes = status.size_bytes;
	shared->block_size = status.block_size;
	return 0;
}

/* The lock is held. */
static int close_volume(const char *name, struct rblk_volume *volume)
{
	int error = -rblk_close(volume);

	if (error)
		log_err("rblk: %s: %s\n", name, rblk_error());
	return error;
}

/* Learns the size of a volume that is not open, and closes it again: the jobs may come later. */
static int probe(struct thread_data *td, struct shared *shared)
{
	struct needs least = { 1, 1, MAX_IO_LEAST };
	struct rblk_volume *volume;
	int error = open_volume(td, least, &volume);

	if (error)
		return error;
	error = learn_size(shared, volume);
	return close_volume(shared->name, volume) ?: error;
}

static int check(struct thread_data *td)
{
	if (td->io_ops != &ioengine) {
		log_err("rblk: the engine was built for another fio: build it for this one\n");
		return EINVAL;
	}
	if (!td->o.use_thread) {
		log_err("rblk: set thread=1: the jobs of a volume share one session\n");
		return EINVAL;
	}
	/* fio would find out later how much a unit carries, and the buffers are made before. */
	if (td->o.read_iolog_chunked) {
		log_err("rblk: read_iolog_chunked is not supported\n");
		return EINVAL;
	}
	if (td->files_index != 1) {
		log_err("rblk: a job has one volume, filename=rdma\\://HOST/VOLUME\n");
		return EINVAL;
	}
	return 0;
}

/* Comes for every job before the first one begins. */
static int engine_setup(struct thread_data *td)
{
	struct shared *shared;
	struct fio_file *file;
	int error = check(td);

	if (error) {
		td_verror(td, error, "rblk");
		return 1;
	}
	pthread_mutex_lock(&lock);
	shared = find_shared(name_of(td));
	if (!shared)
		error = ENOMEM;
	else if (!shared->bytes)
		error = probe(td, shared);
	if (!error)
		error = make_plan(td, shared);
	if (!error) {
		file = td->files[0];
		file->real_file_size = shared->bytes;
		file->filetype = FIO_TYPE_BLOCK;
		fio_file_set_size_known(file);
	}
	pthread_mutex_unlock(&lock);
	if (error) {
		td_verror(td, error, "rblk");
		return 1;
	}
	if (td_min_bs(td) % shared->block_size) {
		log_err("rblk: %s has blocks of %u bytes: bs is no multiple\n", shared->name,
			shared->block_size);
		td_verror(td, EINVAL, "bs");
		return 1;
	}
	return 0;
}

/* The options that matter to all jobs of a volume. */
static void write_options(char *text, size_t len, const struct options *options)
{
	const char *const none = "-";

	snprintf(text, len, "%s %s %s %u", options->config ?: none, options->key_file ?: none,
		 options->target_key ?: none, options->take_over);
}

/* Gives a job its queue. The lock is held. */
static int attach(struct thread_data *td, struct job *job)
{
	struct shared *shared = find_shared(name_of(td));
	char given[sizeof(shared->opened_with)];
	int error;

	if (!shared)
		return ENOMEM;
	write_options(given, sizeof(given), td->eo);
	if (!shared->volume) {
		error = open_volume(td, needs_of(td, shared), &shared->volume);
		if (error)
			return error;
		strcpy(shared->opened_with, given);
	} else if (strcmp(shared->opened_with, given)) {
		log_err("rblk: %s: jobs of a volume need the same options rblk_*\n", shared->name);
		return EINVAL;
	}
	error = -rblk_queue_create(shared->volume, &job->queue);
	if (error)
		log_err("rblk: %s: %s\n", shared->name, rblk_error());
	if (!error) {
		job->shared = shared;
		shared->users++;
	} else if (!shared->users) {
		close_volume(shared->name, shared->volume);
		shared->volume = NULL;
	}
	return error;
}

static void engine_cleanup(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	struct shared *shared;

	if (!job)
		return;
	shared = job->shared;
	if (shared) {
		pthread_mutex_lock(&lock);
		rblk_queue_destroy(job->queue);
		if (--shared->users == 0) {
			close_volume(shared->name, shared->volume);
			shared->volume = NULL;
		}
		pthread_mutex_unlock(&lock);
	}
	free(job->done);
	free(job);
	td->io_ops_data = NULL;
}

/* Whether fio goes on to queue units, or to look for completions, as soon as it has queued one. By
 * default fio commits each unit alone, also then. What the user says about batches is obeyed. */
static bool goes_on_at_once(struct thread_data *td)
{
	const struct thread_options *o = &td->o;

	return o->iodepth_batch == 1 && !should_check_rate(td) && !o->thinktime &&
	       !o->flow && !o->read_iolog_file && o->io_submit_mode != IO_MODE_OFFLOAD;
}

static int engine_init(struct thread_data *td)
{
	struct options *given = td->eo;
	struct job *job;
	int error = check(td);

	if (error)
		return error;
	job = calloc(1, sizeof(*job));
	if (!job)
		return ENOMEM;
	td->io_ops_data = job;
	job->depth = td->o.iodepth;
	job->gathers = goes_on_at_once(td);
	job->sleep = given->sleep;
	job->done = calloc(job->depth, sizeof(*job->done));
	if (!job->done)
		return ENOMEM;
	pthread_mutex_lock(&lock);
	error = attach(td, job);
	pthread_mutex_unlock(&lock);
	return error;
}

/* Memory in which fio prepares its units. The buffers of a queue need not be as near to each other
 * as fio wants them. */
static int engine_iomem_alloc(struct thread_data *td, size_t bytes)
{
	td->orig_buffer = malloc(bytes);
	return td->orig_buffer ? 0 : ENOMEM;
}

static void engine_iomem_free(struct thread_data *td)
{
	free(td->orig_buffer);
	td->orig_buffer = NULL;
}

/* From here on, each unit's data is in a buffer of the queue. */
static int engine_post_init(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	unsigned int i;

	if (rblk_queue_buffer_size(job->queue) < (int64_t)td_max_bs(td) ||
	    rblk_queue_depth(job->queue) < (int)td->o.iodepth) {
		log_err("rblk: the volume was opened for smaller requests, or fewer\n");
		td_verror(td, EINVAL, "rblk");
		return 1;
	}
	for (i = 0; i < td->o.iodepth; i++) {
		struct io_u *io_u = td->io_u_all.io_us[i];
		void *buffer;

		if (!io_u->buf)
			continue;
		buffer = rblk_queue_buffer(job->queue, (int)i);
		if (!buffer) {
			log_err("rblk: %s\n", rblk_error());
			td_verror(td, ENOMEM, "rblk_queue_buffer");
			return 1;
		}
		memcpy(buffer, io_u->buf, td_max_bs(td));
		io_u->buf = buffer;
	}
	engine_iomem_free(td);
	return 0;
}

static int submit(struct rblk_queue *queue, struct io_u *io_u)
{
	uint64_t user_data = (uintptr_t)io_u;

	switch (io_u->ddir) {
	case DDIR_READ:
		return rblk_read(queue, io_u->xfer_buf, io_u->offset, io_u->xfer_buflen, user_data);
	case DDIR_WRITE:
		return rblk_write(queue, io_u->xfer_buf, io_u->offset, io_u->xfer_buflen, 0,
				  user_data);
	case DDIR_TRIM:
		return rblk_discard(queue, io_u->offset, io_u->xfer_buflen, user_data);
	case DDIR_SYNC:
	case DDIR_DATASYNC:
	case DDIR_SYNC_FILE_RANGE:
		return rblk_flush(queue, user_data);
	default:
		return -EINVAL;
	}
}

static enum fio_q_status engine_queue(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	int error;

	fio_ro_check(td, io_u);
	/* Before the request can have left: what it takes to send it counts. */
	if (fio_fill_issue_time(td)) {
		fio_gettime(&io_u->issue_time, NULL);
		if (td->o.read_iolog_file)
			td->last_issue = io_u->issue_time;
	}
	error = -submit(job->queue, io_u);
	if (error == EAGAIN)
		return FIO_Q_BUSY;
	if (error) {
		if (io_u->ddir >= 0 && io_u->ddir < DDIR_LAST)
			log_err("rblk: %s\n", rblk_error());
		io_u->error = error;
		return FIO_Q_COMPLETED;
	}
	job->unsent++;
	job->unsent_bytes += io_u->xfer_buflen;
	if (fio_fill_issue_time(td))
		io_u_queued(td, io_u);
	return FIO_Q_QUEUED;
}

/* What was queued is sent by the next look at the queue. */
static void mark_sent(struct thread_data *td, struct job *job)
{
	if (job->unsent)
		io_u_mark_submit(td, job->unsent);
	job->unsent = 0;
	job->unsent_bytes = 0;
}

/* Sends what is queued, unless more follows at once. */
static int engine_commit(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	int error;

	if (!job->unsent)
		return 0;
	if (job->gathers && job->unsent < UNSENT_MOST && job->unsent_bytes < UNSENT_BYTES_MOST)
		return 0;
	error = rblk_poll(job->queue, NULL, 0);
	if (error < 0) {
		log_err("rblk: %s\n", rblk_error());
		return error;
	}
	mark_sent(td, job);
	return 0;
}

static int64_t milliseconds(const struct timespec *time)
{
	return (int64_t)time->tv_sec * 1000 + time->tv_nsec / 1000000;
}

/* Looks until `wanted` completions are there that fio was not told of, or the time is over. */
static int look(struct job *job, unsigned int wanted, const struct timespec *longest)
{
	struct timespec now;
	int64_t until = 0;
	int count;

	if (longest) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		until = milliseconds(&now) + milliseconds(longest);
	}
	job->got -= job->told;
	memmove(job->done, job->done + job->told, job->got * sizeof(*job->done));
	job->told = 0;
	for (;;) {
		struct rblk_completion *done = job->done + job->got;
		int room = (int)(job->depth - job->got);

		if (job->sleep && job->got < wanted)
			count = rblk_wait(job->queue, done, room, longest ? 1 : SLEEP_MS);
		else
			count = rblk_poll(job->queue, done, room);
		if (count < 0) {
			log_err("rblk: %s\n", rblk_error());
			return count;
		}
		job->got += (unsigned int)count;
		if (job->got >= wanted)
			return 0;
		if (longest) {
			clock_gettime(CLOCK_MONOTONIC, &now);
			if (milliseconds(&now) >= until)
				return 0;
		}
	}
}

/* By default fio takes one completion at a time. A look at the queue for each of them would send one
 * command, so what a look has found is told first. */
static int engine_getevents(struct thread_data *td, unsigned int min, unsigned int max,
			    const struct timespec *longest)
{
	struct job *job = td->io_ops_data;
	unsigned int left;
	int error;

	if (max > job->depth)
		max = job->depth;
	if (min > max)
		min = max;
	left = job->got - job->told;
	if (!left || left < min) {
		mark_sent(td, job);
		error = look(job, min, longest);
		if (error < 0)
			return error;
		left = job->got - job->told;
	}
	if (left > max)
		left = max;
	job->given = job->told;
	job->told += left;
	return (int)left;
}

static struct io_u *engine_event(struct thread_data *td, int event)
{
	struct job *job = td->io_ops_data;
	const struct rblk_completion *done = job->done + job->given + (unsigned int)event;
	struct io_u *io_u = (struct io_u *)(uintptr_t)done->user_data;

	io_u->error = 0;
	io_u->resid = 0;
	if (done->result < 0)
		io_u->error = (unsigned int)-done->result;
	else if (io_u->ddir == DDIR_READ || io_u->ddir == DDIR_WRITE)
		io_u->resid = io_u->xfer_buflen - (unsigned long long)done->result;
	return io_u;
}

/* A volume needs nothing of this. */
static int engine_file(struct thread_data *td, struct fio_file *file)
{
	return 0;
}

struct ioengine_ops ioengine = {
	.name = "rblk",
	.version = FIO_IOOPS_VERSION,
	.flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_ASYNCIO_SETS_ISSUE_TIME,
	.setup = engine_setup,
	.init = engine_init,
	.post_init = engine_post_init,
	.cleanup = engine_cleanup,
	.iomem_alloc = engine_iomem_alloc,
	.iomem_free = engine_iomem_free,
	.queue = engine_queue,
	.commit = engine_commit,
	.getevents = engine_getevents,
	.event = engine_event,
	.open_file = engine_file,
	.close_file = engine_file,
	.invalidate = engine_file,
	.options = options,
	.option_struct_size = sizeof(struct options),
};
