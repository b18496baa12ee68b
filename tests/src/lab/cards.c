/*
 * Makes a Soft-RoCE device behave like cards that nobody here has, as rblk-targetd and
 * rblk-initiatord see them. Preloaded (ld.so(8)), so the programs are the ones that users have.
 * cards.rs compiles and configures it.
 *
 * RBLK_CARDS is a list of behaviours, separated by spaces. NAME@DEVICE=VALUE is of one device only,
 * NAME=VALUE of all.
 *
 *   dead          every query of the device fails: EIO
 *   no-rc         it makes no queue pairs for reliable connections: EOPNOTSUPP
 *   max-wrs=N, max-sges=N, max-cqe=N   what a query of the device says
 *   read-sges=N   the same, of RDMA READs
 *   max-reads=N   the same: READs outstanding, out and in
 *   ird=N         what a connect request says that the peer serves of READs
 *   inline=N      a queue pair that asks for more bytes inline is refused: EINVAL
 *   round         queue pairs and CQs get more entries, and bytes inline, than they asked for
 *   full=N        the first N registrations fail: ENOMEM
 *   slow-accept=MS, slow-modify=MS, slow-create=MS, slow-destroy=MS, slow-register=MS   calls that
 *                 take long
 *   slow-bytes=MS   a registration takes so long for each 64 MiB
 *   gone=FILE     while that file is there, destroy calls fail: EIO
 *   pulled=FILE   the next time that rdma_cm has an event for a listener on the device while the file
 *                 is there, the listener is told first that the device was removed; and as long as
 *                 the file is there, nobody can bind to an address of the device: ENODEV
 *   fatal=FILE    while that file is there, a CQ cannot be polled: EIO
 *   mute=FILE     while that file is there, a CQ says that it is empty
 *   late=N        a CQ says N times that it is empty before it gives a completion that is flushed, or
 *                 until it is armed
 *   shuffle       completions that are given late come in another order of their queue pairs
 *   event=FILE    the asynchronous events whose numbers (ibv_event_type) that file has, with
 *                 spaces between them. The file is taken away. CQ_ERR is of the newest CQ
 *
 * RBLK_CARDS_LOG is a file that gets one line for each call that tests look at. Programs map it: a
 * system call for each line would be a fifth of what a connect costs the target. It begins with
 * the place where the next line goes; a program that is killed may leave a hole of zeros.
 *
 * Profiles of providers (rdma-core/providers, as far as one call can have them):
 *   mlx5    round late=1000 shuffle
 *   irdma   inline=101 slow-accept=12000
 *   bnxt    late=1000 shuffle slow-modify=1
 *   cxgb4   max-sges=4 read-sges=1 max-cqe=32767
 *   fatal   event=FILE fatal=FILE gone=FILE pulled=FILE
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* A behaviour of the plan; without a device, of all devices. */
struct behaviour { char name[32], device[64], value[256]; };
/* Room for the lines of one test: a thousand connects take 2 MiB. */
struct log { _Atomic uint64_t end; char lines[(64 << 20) - sizeof(uint64_t)]; };

static struct behaviour plan[32];
static int behaviours;
static struct log *file_of_lines;
static _Atomic long registrations;
static int (*real_poll)(struct ibv_cq *, int, struct ibv_wc *);
static int (*real_notify)(struct ibv_cq *, int);
static void forget_late(const struct ibv_cq *cq);
static void forget_newest(const struct ibv_cq *cq);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void stop(const char *why)
{
	fprintf(stderr, "cards: %s: %s\n", why, strerror(errno));
	abort();
}

/* NAME, NAME=VALUE or NAME@DEVICE=VALUE. */
static void add(const char *word, size_t len)
{
	struct behaviour *one = &plan[behaviours++];
	const char *value = memchr(word, '=', len), *end = value ? value : word + len;
	const char *device = memchr(word, '@', end - word), *name = device ? device : end;

	if (behaviours > 32 || name - word > 31 || end - name > 64 || word + len - end > 256) {
		errno = E2BIG;
		stop("a word that is too long, or too many");
	}
	memcpy(one->name, word, name - word);
	if (device)
		memcpy(one->device, device + 1, end - device - 1);
	if (value)
		memcpy(one->value, value + 1, word + len - value - 1);
}

static struct log *open_log(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	void *at;

	if (fd < 0 || ftruncate(fd, sizeof(struct log)))
		stop(path);
	at = mmap(NULL, sizeof(struct log), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		stop(path);
	close(fd);
	return at;
}

__attribute__((constructor)) static void begin(void)
{
	const char *name = program_invocation_short_name, *path = getenv("RBLK_CARDS_LOG");
	const char *word = getenv("RBLK_CARDS");

	/* RBLK_CARDS_ALL: programs of tests, too, such as verbs_conformance. */
	if (strcmp(name, "rblk-targetd") && strcmp(name, "rblk-initiatord") &&
	    !getenv("RBLK_CARDS_ALL"))
		return;
	if (word)
		fprintf(stderr, "cards: the devices of %s are like: %s\n", name, word);
	for (; word && *word; word += strspn(word, " ")) {
		size_t len = strcspn(word, " ");

		if (len)
			add(word, len);
		word += len;
	}
	if (path)
		file_of_lines = open_log(path);
}

/* The function that this library stands before, looked up once for each caller. */
#define next(name) \
	({ \
		static void *_Atomic found; \
\
		if (!found && !(found = dlsym(RTLD_NEXT, name))) { \
			errno = ENOSYS; \
			stop(name); \
		} \
		found; \
	})

/* One line. Several programs write into the file, each where no other does. */
__attribute__((format(printf, 1, 2))) static void tell(const char *form, ...)
{
	char line[256];
	uint64_t at;
	va_list args;
	int len;

	if (!file_of_lines)
		return;
	len = snprintf(line, sizeof line, "%s ", program_invocation_short_name);
	va_start(args, form);
	len += vsnprintf(line + len, sizeof line - len, form, args);
	va_end(args);
	at = atomic_fetch_add(&file_of_lines->end, len);
	if (len >= (int)sizeof line || at + len > sizeof file_of_lines->lines) {
		errno = ENOSPC;
		stop("the log");
	}
	memcpy(file_of_lines->lines + at, line, len);
}

/* Not by ibv_get_device_name, of which a library without versions gets the oldest. */
static const char *name_of(const struct ibv_context *context)
{
	return context->device->name;
}

/* The value of a behaviour of a device, or "" if it goes without; NULL if the device has not got
 * the behaviour. */
static const char *value(const struct ibv_context *context, const char *name)
{
	for (const struct behaviour *one = plan; one < plan + behaviours; one++)
		if (!strcmp(one->name, name) &&
		    (!*one->device || (context && !strcmp(one->device, name_of(context)))))
			return one->value;
	return NULL;
}

static long number(const struct ibv_context *context, const char *name, long without)
{
	const char *text = value(context, name);

	return text ? strtol(text, NULL, 10) : without;
}

/* Which thread makes a call that may take long. */
static void tell_of(const char *call)
{
	static __thread char thread[16];

	/* The threads of both daemons are named before they call verbs, and never again. */
	if (!*thread)
		pthread_getname_np(pthread_self(), thread, sizeof thread);
	tell("by %s %s\n", thread, call);
}

static void wait_ms(long ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000 };

	while (ms && nanosleep(&time, &time) && errno == EINTR)
		;
}

static void wait_for(const struct ibv_context *context, const char *name)
{
	wait_ms(number(context, name, 0));
}

static int is_gone(const struct ibv_context *context)
{
	const char *file = value(context, "gone");

	return file && !access(file, F_OK);
}

/* --- what a device says of itself */

static void at_most(int *what, long most)
{
	if (most >= 0 && *what > most)
		*what = most;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	int (*real)(struct ibv_context *, struct ibv_device_attr *) = next("ibv_query_device");
	int error = value(context, "dead") ? EIO : real(context, attr);

	if (error)
		return error;
	at_most(&attr->max_qp_wr, number(context, "max-wrs", -1));
	at_most(&attr->max_sge, number(context, "max-sges", -1));
	at_most(&attr->max_sge_rd, number(context, "read-sges", -1));
	at_most(&attr->max_cqe, number(context, "max-cqe", -1));
	at_most(&attr->max_qp_rd_atom, number(context, "max-reads", -1));
	at_most(&attr->max_qp_init_rd_atom, number(context, "max-reads", -1));
	return 0;
}

/* --- queue pairs */

static int refuses(struct ibv_context *context, const struct ibv_qp_init_attr *attr)
{
	long most = number(context, "inline", -1);

	if (value(context, "no-rc") && attr->qp_type == IBV_QPT_RC)
		return EOPNOTSUPP;
	return most >= 0 && attr->cap.max_inline_data > most ? EINVAL : 0;
}

/* One less than a power of two, as long as a device has so many: Soft-RoCE itself adds one. */
static uint32_t rounded(uint32_t asked, uint32_t most)
{
	uint32_t up = 1;

	while (up <= asked)
		up = 2 * up + 1;
	return up <= most ? up : asked;
}

/* What Soft-RoCE has at most: WRs of a queue, bytes inline. */
#define MOST_WRS 16384
#define MOST_INLINE 512

static void round_up(struct ibv_qp_cap *cap)
{
	cap->max_send_wr = rounded(cap->max_send_wr, MOST_WRS);
	cap->max_recv_wr = rounded(cap->max_recv_wr, MOST_WRS);
	cap->max_inline_data = rounded(cap->max_inline_data, MOST_INLINE);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *(*real)(struct ibv_pd *, struct ibv_qp_init_attr *) = next("ibv_create_qp");
	int error = refuses(pd->context, attr);

	if (error) {
		errno = error;
		return NULL;
	}
	tell_of("ibv_create_qp");
	wait_for(pd->context, "slow-create");
	if (value(pd->context, "round"))
		round_up(&attr->cap);
	return real(pd, attr);
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	int (*real)(struct ibv_qp *) = next("ibv_destroy_qp");

	tell_of("ibv_destroy_qp");
	wait_for(qp->context, "slow-destroy");
	return real(qp);
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	int (*real)(struct ibv_qp *, struct ibv_qp_attr *, int) = next("ibv_modify_qp");

	tell_of("ibv_modify_qp");
	wait_for(qp->context, "slow-modify");
	if (mask & IBV_QP_AV)
		tell("tos %u\n", attr->ah_attr.grh.traffic_class);
	if (mask & IBV_QP_TIMEOUT)
		tell("timeout %u\n", attr->timeout);
	return real(qp, attr, mask);
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	int (*real)(struct rdma_cm_id *, struct rdma_conn_param *) = next("rdma_accept");

	tell_of("rdma_accept");
	tell("reads %u\n", param->initiator_depth);
	wait_for(id->verbs, "slow-accept");
	return real(id, param);
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	int (*real)(struct rdma_cm_id *, struct rdma_conn_param *) = next("rdma_connect");

	tell_of("rdma_connect");
	return real(id, param);
}

int rdma_disconnect(struct rdma_cm_id *id)
{
	int (*real)(struct rdma_cm_id *) = next("rdma_disconnect");

	tell_of("rdma_disconnect");
	return real(id);
}

/* --- memory */

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
				unsigned int access)
{
	struct ibv_mr *(*real)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int) =
		next("ibv_reg_mr_iova2");

	struct ibv_mr *mr;

	tell_of("ibv_reg_mr");
	tell("registers begin %zu\n", len);
	wait_for(pd->context, "slow-register");
	wait_ms(number(pd->context, "slow-bytes", 0) * (long)(len >> 20) / 64);
	if (atomic_fetch_add(&registrations, 1) < number(pd->context, "full", 0)) {
		tell("full %zu\n", len);
		errno = ENOMEM;
		return NULL;
	}
	tell("register %s %zu 0x%x\n", name_of(pd->context), len, access);
	mr = real(pd, addr, len, iova, access);
	tell("registers end %zu\n", len);
	return mr;
}

/* --- the end of a device */

#define DESTROY(name, call, type, context) \
	name(type *object) \
	{ \
		int (*real)(type *) = next(#call); \
		const char *allowed = getenv("RDMAV_ALLOW_DISASSOC_DESTROY"); \
		int gone = is_gone(context), error = real(object); \
\
		/* What libibverbs itself makes of EIO. */ \
		if (!gone || error) \
			return error; \
		tell(#call " %s\n", allowed ? "freed" : "EIO"); \
		return allowed ? 0 : EIO; \
	}

DESTROY(int ibv_dereg_mr, ibv_dereg_mr, struct ibv_mr, object->context)
DESTROY(int ibv_dealloc_pd, ibv_dealloc_pd, struct ibv_pd, object->context)
DESTROY(static int destroy_cq, ibv_destroy_cq, struct ibv_cq, object->context)

int ibv_destroy_cq(struct ibv_cq *cq)
{
	forget_late(cq);
	forget_newest(cq);
	return destroy_cq(cq);
}

static int is_pulled(const struct ibv_context *context)
{
	const char *file = context ? value(context, "pulled") : NULL;

	return file && !access(file, F_OK);
}

/* The listeners, by channel. */
static struct rdma_cm_id *listeners[64];
static struct rdma_cm_event removal;

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	int (*real)(struct rdma_cm_id *, int) = next("rdma_listen");
	int i = 0;

	pthread_mutex_lock(&lock);
	while (i < 63 && listeners[i])
		i++;
	listeners[i] = id;
	pthread_mutex_unlock(&lock);
	return real(id, backlog);
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	int (*real)(struct rdma_cm_id *) = next("rdma_destroy_id");

	pthread_mutex_lock(&lock);
	for (int i = 0; i < 64; i++)
		if (listeners[i] == id)
			listeners[i] = NULL;
	pthread_mutex_unlock(&lock);
	return real(id);
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr)
{
	int (*real)(struct rdma_cm_id *, struct sockaddr *) = next("rdma_bind_addr");
	int failed = real(id, addr);

	if (failed || !is_pulled(id->verbs))
		return failed;
	errno = ENODEV;
	return -1;
}

int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
	int (*real)(struct rdma_event_channel *, struct rdma_cm_event **) =
		next("rdma_get_cm_event");
	struct rdma_cm_id *told = NULL;
	struct pollfd ready = { .fd = channel->fd, .events = POLLIN };

	pthread_mutex_lock(&lock);
	for (int i = 0; i < 64 && !removal.id; i++) {
		struct rdma_cm_id *id = listeners[i];

		if (!id || id->channel != channel || !is_pulled(id->verbs) || poll(&ready, 1, 0) < 1)
			continue;
		removal = (struct rdma_cm_event){ .id = told = id,
						  .event = RDMA_CM_EVENT_DEVICE_REMOVAL };
		/* Once. */
		listeners[i] = NULL;
	}
	pthread_mutex_unlock(&lock);
	if (told) {
		*event = &removal;
		return 0;
	}
	if (real(channel, event))
		return -1;
	if ((*event)->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		long ird = number((*event)->id->verbs, "ird", -1);

		if (ird >= 0)
			(*event)->param.conn.initiator_depth = ird;
	}
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	int (*real)(struct rdma_cm_event *) = next("rdma_ack_cm_event");

	if (event != &removal)
		return real(event);
	pthread_mutex_lock(&lock);
	removal.id = NULL;
	pthread_mutex_unlock(&lock);
	return 0;
}

/* --- completions */

/* What a CQ gives late: a completion that is flushed, those that came with it, and in how many
 * polls. */
struct late { struct ibv_cq *cq; struct ibv_wc wcs[64]; int at, end; long left; };
static struct late lates[64];
/* No place of `lates` behind these is in use. */
static int lates_end;
static pthread_mutex_t lates_lock = PTHREAD_MUTEX_INITIALIZER;

static struct late *late_of(const struct ibv_cq *cq)
{
	for (int i = 0; i < lates_end; i++)
		if (lates[i].cq == cq)
			return &lates[i];
	return NULL;
}

static struct late *free_late(void)
{
	struct late *late = late_of(NULL);

	return late || lates_end == 64 ? late : &lates[lates_end++];
}

static int give(struct late *late, int most, struct ibv_wc *wcs)
{
	int found = 0;

	while (found < most && late->at < late->end)
		wcs[found++] = late->wcs[late->at++];
	if (late->at == late->end)
		late->cq = NULL;
	return found;
}

/* Each queue pair keeps its own order. */
static void shuffle(struct ibv_wc *wcs, int count)
{
	for (int i = 1; i < count; i++)
		for (int at = i; at > 0 && wcs[at - 1].qp_num < wcs[at].qp_num; at--) {
			struct ibv_wc one = wcs[at];

			wcs[at] = wcs[at - 1];
			wcs[at - 1] = one;
		}
}

/* Keeps the first that is flushed, and what is behind it. Returns how many are before it. */
static int keep(struct ibv_cq *cq, int found, struct ibv_wc *wcs, long polls)
{
	struct late *late = NULL;
	int at = 0;

	while (at < found && wcs[at].status != IBV_WC_WR_FLUSH_ERR)
		at++;
	if (at < found && found - at <= 64)
		late = free_late();
	if (!late)
		return found;
	late->cq = cq;
	late->at = 0;
	late->end = found - at;
	late->left = polls;
	memcpy(late->wcs, wcs + at, (found - at) * sizeof *wcs);
	if (value(cq->context, "shuffle"))
		shuffle(late->wcs, late->end);
	return at;
}

/* What the plan says of the CQs of a context: programs poll more often than they do anything else. */
struct polled {
	const struct ibv_context *_Atomic context;
	const char *fatal, *mute;
	long late;
	/* Events that are to come, as text, and the CQ that they name. */
	char events[64];
	struct ibv_cq *newest;
};
static struct polled polled[64];

static struct polled *polled_as(const struct ibv_context *context)
{
	for (int i = 0; i < 64; i++)
		if (polled[i].context == context)
			return &polled[i];
	errno = ENOENT;
	stop("a CQ of a context that made none");
	return NULL;
}

/* Under the lock. A context may be where another was that is closed. */
static void will_poll(const struct ibv_context *context)
{
	int i = 0;

	while (i < 63 && polled[i].context && polled[i].context != context)
		i++;
	polled[i].fatal = value(context, "fatal");
	polled[i].mute = value(context, "mute");
	polled[i].late = number(context, "late", 0);
	if (polled[i].context != context) {
		polled[i].newest = NULL;
		*polled[i].events = 0;
	}
	polled[i].context = context;
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wcs)
{
	const struct polled *as = polled_as(cq->context);
	struct late *late;
	int found = 0;
	long polls = as->late;

	if (as->fatal && !access(as->fatal, F_OK)) {
		tell("fatal %s\n", name_of(cq->context));
		return -EIO;
	}
	if (as->mute && !access(as->mute, F_OK))
		return 0;
	if (!polls)
		return real_poll(cq, most, wcs);
	pthread_mutex_lock(&lates_lock);
	late = late_of(cq);
	if (late)
		found = late->left-- > 0 ? 0 : give(late, most, wcs);
	else if ((found = real_poll(cq, most, wcs)) > 0)
		found = keep(cq, found, wcs, polls);
	pthread_mutex_unlock(&lates_lock);
	return found;
}

/* Who arms a CQ looks once more and sleeps. A card would wake it; here the look finds it. */
static int req_notify(struct ibv_cq *cq, int solicited_only)
{
	struct late *late;

	pthread_mutex_lock(&lates_lock);
	late = late_of(cq);
	if (late)
		late->left = 0;
	pthread_mutex_unlock(&lates_lock);
	return real_notify(cq, solicited_only);
}

static void forget_late(const struct ibv_cq *cq)
{
	struct late *late;

	pthread_mutex_lock(&lates_lock);
	late = late_of(cq);
	if (late)
		late->cq = NULL;
	pthread_mutex_unlock(&lates_lock);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *own,
			     struct ibv_comp_channel *channel, int vector)
{
	struct ibv_cq *(*real)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int) =
		next("ibv_create_cq");

	struct ibv_cq *cq;

	tell("vector %d of %d\n", vector, context->num_comp_vectors);
	pthread_mutex_lock(&lock);
	will_poll(context);
	/* All contexts of these tests are of one provider. */
	if ((value(context, "late") || value(context, "fatal") || value(context, "mute")) &&
	    context->ops.poll_cq != poll_cq) {
		real_poll = context->ops.poll_cq;
		real_notify = context->ops.req_notify_cq;
		context->ops.poll_cq = poll_cq;
		context->ops.req_notify_cq = req_notify;
	}
	pthread_mutex_unlock(&lock);
	if (value(context, "round"))
		entries = rounded(entries, number(context, "max-cqe", 32767));
	cq = real(context, entries, own, channel, vector);
	if (cq) {
		pthread_mutex_lock(&lock);
		polled_as(context)->newest = cq;
		pthread_mutex_unlock(&lock);
	}
	return cq;
}

int ibv_close_device(struct ibv_context *context)
{
	int (*real)(struct ibv_context *) = next("ibv_close_device");

	pthread_mutex_lock(&lock);
	for (int i = 0; i < 64; i++)
		if (polled[i].context == context)
			polled[i].context = NULL;
	pthread_mutex_unlock(&lock);
	return real(context);
}

static void forget_newest(const struct ibv_cq *cq)
{
	pthread_mutex_lock(&lock);
	for (int i = 0; i < 64; i++)
		if (polled[i].newest == cq)
			polled[i].newest = NULL;
	pthread_mutex_unlock(&lock);
}

/* --- asynchronous events */

/* This thread has an event that no device gave. */
static __thread int is_forged;

/* The context that has this descriptor for its events, if events are to come. Under the lock. */
static struct polled *with_events(int fd)
{
	for (struct polled *of = polled; of < polled + 64; of++) {
		const struct ibv_context *context = of->context;
		const char *path;
		int file;
		ssize_t len;

		if (!context || context->async_fd != fd || !(path = value(context, "event")))
			continue;
		file = open(path, O_RDONLY | O_CLOEXEC);
		if (file >= 0) {
			len = read(file, of->events, sizeof of->events - 1);
			of->events[len > 0 ? len : 0] = 0;
			close(file);
			unlink(path);
		}
		return *of->events ? of : NULL;
	}
	return NULL;
}

/* Who waits for events looks after a second at the latest. */
int poll(struct pollfd *fds, nfds_t count, int timeout)
{
	int (*real)(struct pollfd *, nfds_t, int) = next("poll");
	struct polled *of = NULL;

	if (behaviours && count == 2) {
		pthread_mutex_lock(&lock);
		of = with_events(fds[0].fd);
		pthread_mutex_unlock(&lock);
	}
	if (!of)
		return real(fds, count, timeout);
	fds[0].revents = POLLIN;
	fds[1].revents = 0;
	return 1;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	int (*real)(struct ibv_context *, struct ibv_async_event *) = next("ibv_get_async_event");
	struct polled *of;
	char *rest;

	pthread_mutex_lock(&lock);
	of = with_events(context->async_fd);
	is_forged = of != NULL;
	if (of) {
		*event = (struct ibv_async_event){ .event_type = strtol(of->events, &rest, 10) };
		if (event->event_type == IBV_EVENT_CQ_ERR)
			event->element.cq = of->newest;
		memmove(of->events, rest, strlen(rest) + 1);
	}
	pthread_mutex_unlock(&lock);
	if (!is_forged)
		return real(context, event);
	tell("event %d of %s\n", event->event_type, name_of(context));
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	void (*real)(struct ibv_async_event *) = next("ibv_ack_async_event");

	/* The device would be asked whether it gave as many. */
	if (!is_forged)
		real(event);
	is_forged = 0;
}
