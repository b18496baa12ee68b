/*
 * Flips bits in what an RDMA device delivers to rblk-targetd and rblk-initiatord, between the
 * device and the program: a work completion is reaped, a bit of the memory that it delivered is
 * flipped, and only then the program gets the completion. Preloaded (ld.so(8)), so the programs are
 * the ones that users have. flip.rs compiles and configures it.
 *
 * RBLK_FLIP       a seed, and for each kind below: one flip in so many deliveries, 0 for none
 * RBLK_FLIP_COUNT a file with two 64-bit counters for each kind: deliveries and flips
 *
 * A connection gets its first flip after its first READ or WRITE: hellos, handshakes and
 * self-tests are not of the I/O, and admin connections carry neither.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* In the order of flip.rs. */
enum kind {
	COMMAND,    /* capsules that the target receives */
	IN_CAPSULE, /* data behind them */
	SINK,       /* data that an RDMA READ of the target placed */
	RESPONSE,   /* capsules that the initiator receives */
	DATA,       /* data that RDMA WRITEs placed at the initiator */
	TRAILER,    /* the trailer behind that data */
	KINDS
};

/* The wire: protocol/src/capsule.rs. A test compares what is delivered with what was done. */
enum {
	CAPSULE = 64, TAG_AT = 2, IN_CAPSULE_AT = 36, BUFFER_AT = 48, LENGTH_AT = 56, KEY_AT = 60,
	OP_READ = 1, OP_WRITE = 2, FLAG_DIGEST = 4, TRAILER_BYTES = 8,
};

enum { REGIONS = 1 << 14, QPS = 1 << 12, RING = 1 << 13, TAGS = 1 << 10, MESSAGE = 1 << 18 };

struct range {
	uint64_t id, addr;
	uint32_t key, len;
};

struct ring {
	struct range at[RING];
	uint32_t head, tail;
};

struct tag {
	struct range buffer;
	int digest;
};

struct qp {
	uint32_t num;
	int carries_io;
	struct ring recvs, reads;
	struct tag tags[TAGS];
};

struct region {
	struct ibv_mr *mr;
	uint64_t iova;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region regions[REGIONS];
static struct qp *qps[QPS];
static uint64_t every[KINDS], state;
static _Atomic uint64_t *counts;
static int is_target, is_on;
static int (*real_poll)(struct ibv_cq *, int, struct ibv_wc *);
static int (*real_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
static int (*real_recv)(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);

static void stop(const char *why)
{
	fprintf(stderr, "flip: %s: %s\n", why, strerror(errno));
	abort();
}

__attribute__((constructor)) static void begin(void)
{
	const char *plan = getenv("RBLK_FLIP"), *file = getenv("RBLK_FLIP_COUNT");
	const char *name = program_invocation_short_name;
	int fd;

	is_target = !strcmp(name, "rblk-targetd");
	is_on = plan && file && (is_target || !strcmp(name, "rblk-initiatord"));
	if (!is_on)
		return;
	if (sscanf(plan, "%lu %lu %lu %lu %lu %lu %lu", &state, &every[0], &every[1], &every[2],
		   &every[3], &every[4], &every[5]) != 1 + KINDS)
		stop("RBLK_FLIP");
	state ^= (uint64_t)is_target << 63;
	fd = open(file, O_RDWR);
	counts = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || counts == MAP_FAILED)
		stop(file);
	close(fd);
	fprintf(stderr, "flip: %s flips bits of what its RDMA device delivers: %s\n", name, plan);
}

static void *next(const char *name)
{
	void *found = dlsym(RTLD_NEXT, name);

	if (!found)
		stop(name);
	return found;
}

/* splitmix64. */
static uint64_t random_below(uint64_t most)
{
	uint64_t word = state += 0x9e3779b97f4a7c15;

	word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
	word = (word ^ word >> 27) * 0x94d049bb133111eb;
	return (word ^ word >> 31) % most;
}

/* The bytes of a range of a registered region; NULL if there is none. */
static uint8_t *bytes(uint32_t key, uint64_t addr, uint32_t len)
{
	for (int i = 0; i < REGIONS && len; i++) {
		struct region *r = &regions[i];

		if (r->mr && (r->mr->lkey == key || r->mr->rkey == key) && addr >= r->iova &&
		    addr + len <= r->iova + r->mr->length)
			return (uint8_t *)r->mr->addr + (addr - r->iova);
	}
	return NULL;
}

/* Something was delivered. */
static void delivered(enum kind kind, uint8_t *at, uint64_t len)
{
	if (!at || !len)
		return;
	atomic_fetch_add(&counts[2 * kind], 1);
	if (!every[kind] || random_below(every[kind]))
		return;
	at[random_below(len)] ^= 1 << random_below(8);
	atomic_fetch_add(&counts[2 * kind + 1], 1);
}

static uint32_t number(const uint8_t *at)
{
	return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

static struct qp *find(uint32_t num)
{
	for (uint32_t i = 0; i < QPS; i++) {
		struct qp *qp = qps[(num + i) % QPS];

		if (!qp || qp->num == num)
			return qp;
	}
	return NULL;
}

static void push(struct ring *ring, uint64_t id, const struct ibv_sge *sge)
{
	struct range at = { id, sge ? sge->addr : 0, sge ? sge->lkey : 0, sge ? sge->length : 0 };

	if (ring->tail - ring->head == RING)
		stop("more requests than this knows");
	ring->at[ring->tail++ % RING] = at;
}

/* Walks the capsules of a message; returns the bytes of all of them. */
static uint32_t capsules(struct qp *qp, const uint8_t *message, uint32_t len)
{
	uint32_t at = 0, data_at = len;

	while (at + CAPSULE <= data_at) {
		const uint8_t *c = message + at;
		uint32_t data = number(c + IN_CAPSULE_AT), tag = c[TAG_AT] | c[TAG_AT + 1] << 8;

		if (c[0] == OP_READ && tag < TAGS) {
			uint64_t addr = number(c + BUFFER_AT) | (uint64_t)number(c + BUFFER_AT + 4) << 32;

			qp->tags[tag] = (struct tag){
				{ 0, addr, number(c + KEY_AT), number(c + LENGTH_AT) }, c[1] & FLAG_DIGEST
			};
		}
		if (c[0] == OP_READ || c[0] == OP_WRITE)
			qp->carries_io = 1;
		at += CAPSULE;
		data_at -= data < data_at ? data : data_at;
	}
	return at;
}

/* A message of the initiator is about to be posted. */
static void look_at_send(struct qp *qp, const struct ibv_send_wr *wr)
{
	static uint8_t message[MESSAGE];
	uint32_t len = 0;

	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];
		uint8_t *from = bytes(sge->lkey, sge->addr, sge->length);

		if (!from || len + sge->length > MESSAGE)
			return;
		memcpy(message + len, from, sge->length);
		len += sge->length;
	}
	capsules(qp, message, len);
}

static int post_send(struct ibv_qp *to, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	pthread_mutex_lock(&lock);
	struct qp *qp = find(to->qp_num);
	for (struct ibv_send_wr *w = wr; w && qp; w = w->next) {
		for (int i = 0; w->opcode == IBV_WR_RDMA_READ && i < w->num_sge; i++)
			push(&qp->reads, w->wr_id, &w->sg_list[i]);
		if (w->opcode == IBV_WR_SEND && !is_target)
			look_at_send(qp, w);
	}
	pthread_mutex_unlock(&lock);
	return real_send(to, wr, bad);
}

static int post_recv(struct ibv_qp *to, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	pthread_mutex_lock(&lock);
	struct qp *qp = find(to->qp_num);
	for (struct ibv_recv_wr *w = wr; w && qp; w = w->next)
		push(&qp->recvs, w->wr_id, w->num_sge ? w->sg_list : NULL);
	pthread_mutex_unlock(&lock);
	return real_recv(to, wr, bad);
}

static void received(struct qp *qp, const struct ibv_wc *wc, const struct range *slot)
{
	uint8_t *message = bytes(slot->key, slot->addr, slot->len);
	int carried_io = qp->carries_io;

	if (!message || wc->byte_len > slot->len)
		return;
	if (!is_target) {
		if (carried_io)
			delivered(RESPONSE, message, wc->byte_len);
		return;
	}
	uint32_t len = capsules(qp, message, wc->byte_len);
	if (carried_io) {
		delivered(COMMAND, message, len);
		delivered(IN_CAPSULE, message + len, wc->byte_len - len);
	}
}

/* The data of a READ is at the initiator. */
static void placed(struct qp *qp, uint32_t immediate)
{
	struct tag *tag = &qp->tags[immediate % TAGS];
	struct range *to = &tag->buffer;
	uint32_t trailer = tag->digest && to->len > TRAILER_BYTES ? TRAILER_BYTES : 0;
	uint8_t *data = bytes(to->key, to->addr, to->len);

	if (!data)
		return;
	delivered(DATA, data, to->len - trailer);
	delivered(TRAILER, data + to->len - trailer, trailer);
}

static void completed(const struct ibv_wc *wc)
{
	struct qp *qp = find(wc->qp_num);
	struct range *at;

	if (!qp || wc->status != IBV_WC_SUCCESS)
		return;
	switch (wc->opcode) {
	case IBV_WC_RECV:
	case IBV_WC_RECV_RDMA_WITH_IMM:
		/* They complete in the order in which they were posted. */
		at = &qp->recvs.at[qp->recvs.head % RING];
		if (qp->recvs.head++ == qp->recvs.tail || at->id != wc->wr_id)
			stop("a RECV that was not posted next");
		if (wc->opcode == IBV_WC_RECV)
			received(qp, wc, at);
		else if (qp->carries_io)
			placed(qp, ntohl(wc->imm_data) & 0xffff);
		break;
	case IBV_WC_RDMA_READ:
		/* It may tell of READs before it. */
		while (qp->reads.head != qp->reads.tail) {
			uint64_t last = wc->wr_id;

			at = &qp->reads.at[qp->reads.head++ % RING];
			delivered(SINK, bytes(at->key, at->addr, at->len), at->len);
			if (at->id == last && (qp->reads.head == qp->reads.tail ||
					       qp->reads.at[qp->reads.head % RING].id != last))
				break;
		}
		break;
	default:
		break;
	}
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wcs)
{
	int found = real_poll(cq, most, wcs);

	if (found > 0) {
		pthread_mutex_lock(&lock);
		for (int i = 0; i < found; i++)
			completed(&wcs[i]);
		pthread_mutex_unlock(&lock);
	}
	return found;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *own,
			     struct ibv_comp_channel *channel, int vector)
{
	struct ibv_cq *(*real)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int) =
		next("ibv_create_cq");

	pthread_mutex_lock(&lock);
	/* All contexts of these tests are of one provider. */
	if (is_on && context->ops.poll_cq != poll_cq) {
		real_poll = context->ops.poll_cq;
		real_send = context->ops.post_send;
		real_recv = context->ops.post_recv;
		context->ops.poll_cq = poll_cq;
		context->ops.post_send = post_send;
		context->ops.post_recv = post_recv;
	}
	pthread_mutex_unlock(&lock);
	return real(context, entries, own, channel, vector);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
				unsigned int access)
{
	struct ibv_mr *(*real)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int) =
		next("ibv_reg_mr_iova2");
	struct ibv_mr *mr = real(pd, addr, len, iova, access);
	int i = 0;

	pthread_mutex_lock(&lock);
	while (i < REGIONS && regions[i].mr)
		i++;
	if (mr && i == REGIONS)
		stop("more regions than this knows");
	if (mr)
		regions[i] = (struct region){ mr, iova };
	pthread_mutex_unlock(&lock);
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	int (*real)(struct ibv_mr *) = next("ibv_dereg_mr");

	pthread_mutex_lock(&lock);
	for (int i = 0; i < REGIONS; i++)
		if (regions[i].mr == mr)
			regions[i].mr = NULL;
	pthread_mutex_unlock(&lock);
	return real(mr);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *(*real)(struct ibv_pd *, struct ibv_qp_init_attr *) = next("ibv_create_qp");
	struct ibv_qp *qp = real(pd, attr);

	if (!qp || !is_on)
		return qp;
	pthread_mutex_lock(&lock);
	uint32_t num = qp->qp_num, i = 0;
	while (i < QPS && qps[(num + i) % QPS] && qps[(num + i) % QPS]->num != num)
		i++;
	struct qp **place = &qps[(num + i) % QPS];
	if (i == QPS || (!*place && !(*place = malloc(sizeof **place))))
		stop("more queue pairs than this knows");
	/* A number is used again after its queue pair is gone. */
	memset(*place, 0, sizeof **place);
	(*place)->num = num;
	pthread_mutex_unlock(&lock);
	return qp;
}
