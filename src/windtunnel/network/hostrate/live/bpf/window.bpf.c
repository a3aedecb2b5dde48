/* CUBIC under a window that the host's controller gives: the kernel's own functions, and a cap from a map.
 *
 * An entity's window is given as what each of its flows has: `floor` packets, and one more for `extra` of them,
 * beginning with flow number `turn`. A cap holds until a time that the controller writes with it; after that the
 * flows are CUBIC's. Flows whose part is less than two packets (a receiver waits with the acknowledgement of one) get
 * `pace`, too. Flows that are acknowledged in a round of the controller are counted in it.
 *
 * Some kernels (a 6.18 in a virtual machine, once in some thousand losses) take an address of their own for what
 * "ssthresh" returns: a window without bounds. So it is written down, and put right at the next acknowledgement.
 *
 * "choose" makes new connections of entities use this congestion control; what belongs to none keeps its own.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "GPL";

#define INLINE static __always_inline
#define KERNEL __attribute__((preserve_access_index))
#define LEVELS 8
#define SOURCE 0
#define CGROUP 1
#define FREE 0xFFFFFFFFU
#define WIDEST (1U << 24) /* packets: 24 GB */

struct kernfs_node { __u64 id; } KERNEL;
struct cgroup;
struct cgroup_subsys_state { struct cgroup *cgroup; struct cgroup_subsys_state *parent; } KERNEL;
struct cgroup { struct cgroup_subsys_state self; struct kernfs_node *kn; } KERNEL;
struct sock_cgroup_data { struct cgroup *cgroup; } KERNEL;
struct in6 { __u8 bytes[16]; };
struct sock_common {
	unsigned short skc_family;
	__u32 skc_rcv_saddr;
	struct in6 skc_v6_rcv_saddr;
} KERNEL;
struct sock {
	struct sock_common __sk_common;
	struct sock_cgroup_data sk_cgrp_data;
	unsigned long sk_max_pacing_rate;
} KERNEL;
struct tcp_sock { __u32 snd_cwnd, snd_ssthresh; } KERNEL;
struct ack_sample { __u32 pkts_acked; } KERNEL;
enum tcp_ca_event { UNUSED };
struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	void (*set_state)(struct sock *sk, __u8 state);
	void (*cwnd_event)(struct sock *sk, enum tcp_ca_event event);
	void (*pkts_acked)(struct sock *sk, const struct ack_sample *sample);
	__u32 (*undo_cwnd)(struct sock *sk);
	void (*init)(struct sock *sk);
	char name[16];
};

extern void cubictcp_init(struct sock *sk) __ksym;
extern __u32 cubictcp_recalc_ssthresh(struct sock *sk) __ksym;
extern void cubictcp_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern void cubictcp_state(struct sock *sk, __u8 state) __ksym;
extern void cubictcp_cwnd_event(struct sock *sk, enum tcp_ca_event event) __ksym;
extern void cubictcp_acked(struct sock *sk, const struct ack_sample *sample) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

struct allowed { /* written by the controller; flows 0: no cap */
	__u32 floor, extra, turn, flows;
	__u32 pace; /* bytes/s of each flow, FREE: not paced */
	__u32 pad;
};
struct count { /* written here */
	__u64 acked; /* packets, ever */
	__u64 seen; /* flows, once in each round in which they are acknowledged */
	__u64 numbers; /* given to flows so far */
};
struct common {
	__u64 until; /* caps hold so long, in ns of the clock */
	__u32 round, by;
	char name[16]; /* of this congestion control */
};
struct prefix {
	__u32 bits;
	__u8 address[16]; /* of IPv4 ::ffff:a.b.c.d */
};
struct flow {
	__u32 entity, number; /* number 0: not known yet */
	__u32 round;
	__u32 pace; /* 0: as it was */
	__u32 before; /* what pacing it had from others */
	__u32 threshold; /* returned last */
};

#define MAP(name, kind, k, v) \
	struct { __uint(type, kind); __uint(max_entries, 1); __type(key, k); __type(value, v); } name SEC(".maps")
MAP(allowed, BPF_MAP_TYPE_ARRAY, __u32, struct allowed);
MAP(counts, BPF_MAP_TYPE_ARRAY, __u32, struct count);
MAP(common, BPF_MAP_TYPE_ARRAY, __u32, struct common);
MAP(cgroups, BPF_MAP_TYPE_HASH, __u64, __u32);
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix);
	__type(value, __u32);
} prefixes SEC(".maps");
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct flow);
} flows SEC(".maps");

INLINE __u32 entity_of(struct sock *sk, __u32 by)
{
	const __u32 *found = 0;

	if (by == CGROUP) {
		struct cgroup *one = sk->sk_cgrp_data.cgroup;
		/* the innermost that is an entity; at the top pointers are 0, and so is what is read behind them */
		for (int level = 0; level < LEVELS && !found; level++) {
			__u64 id = one->kn->id;
			found = bpf_map_lookup_elem(&cgroups, &id);
			one = one->self.parent->cgroup;
		}
	} else {
		struct prefix key = {.bits = 128};
		if (sk->__sk_common.skc_family == 2) {
			__u32 address = sk->__sk_common.skc_rcv_saddr;
			key.address[10] = key.address[11] = 0xFF;
			__builtin_memcpy(&key.address[12], &address, 4);
		} else {
			struct in6 *address = &sk->__sk_common.skc_v6_rcv_saddr;
#pragma unroll
			for (int k = 0; k < 16; k++)
				key.address[k] = address->bytes[k];
		}
		found = bpf_map_lookup_elem(&prefixes, &key);
	}
	return found ? *found : 0;
}

/* The flow's record, with its entity and number once it has any. */
INLINE struct flow *flow_of(struct sock *sk, const struct common *all)
{
	struct flow *flow = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (flow && !flow->number) {
		flow->entity = entity_of(sk, all->by);
		struct count *count = bpf_map_lookup_elem(&counts, &flow->entity);
		if (count)
			flow->number = __sync_fetch_and_add(&count->numbers, 1) + 1;
	}
	return flow;
}

INLINE void set_pace(struct sock *sk, struct flow *flow, __u32 pace)
{
	if (flow->pace == pace)
		return;
	if (!flow->pace) {
		unsigned long before = sk->sk_max_pacing_rate;
		flow->before = before < FREE ? before : FREE;
	}
	__u32 rate = !pace || pace > flow->before ? flow->before : pace;
	if (!bpf_setsockopt(sk, 1 /* SOL_SOCKET */, 47 /* SO_MAX_PACING_RATE */, &rate, sizeof(rate)))
		flow->pace = pace;
}

INLINE void cap(struct sock *sk, struct flow *flow, const struct common *all)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct allowed *may = bpf_map_lookup_elem(&allowed, &flow->entity);

	if (!may || !may->flows || bpf_ktime_get_ns() >= all->until) {
		set_pace(sk, flow, 0);
		return;
	}
	__u32 most = may->floor + ((flow->number + may->flows - may->turn % may->flows) % may->flows < may->extra);
	if (!most)
		most = 1; /* with none it would not be asked again */
	if (tp->snd_cwnd > most)
		tp->snd_cwnd = most;
	set_pace(sk, flow, may->pace);
}

INLINE void put_right(struct sock *sk, const struct flow *flow)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;

	if (flow->threshold && ((__s32)tp->snd_ssthresh < 0 || tp->snd_cwnd > WIDEST)) {
		tp->snd_ssthresh = flow->threshold;
		tp->snd_cwnd = flow->threshold;
	}
}

SEC("struct_ops/init")
void BPF_PROG(init, struct sock *sk)
{
	cubictcp_init(sk);
}

SEC("struct_ops/ssthresh")
__u32 BPF_PROG(ssthresh, struct sock *sk)
{
	struct flow *flow = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (flow)
		put_right(sk, flow);
	__u32 threshold = cubictcp_recalc_ssthresh(sk);
	if (flow)
		flow->threshold = threshold;
	return threshold;
}

SEC("struct_ops/set_state")
void BPF_PROG(set_state, struct sock *sk, __u8 state)
{
	cubictcp_state(sk, state);
}

SEC("struct_ops/cwnd_event")
void BPF_PROG(cwnd_event, struct sock *sk, enum tcp_ca_event event)
{
	cubictcp_cwnd_event(sk, event);
}

SEC("struct_ops/undo_cwnd")
__u32 BPF_PROG(undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

SEC("struct_ops/pkts_acked")
void BPF_PROG(pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	__u32 zero = 0;
	const struct common *all = bpf_map_lookup_elem(&common, &zero);
	struct flow *flow = all ? flow_of(sk, all) : 0;

	cubictcp_acked(sk, sample);
	if (!flow)
		return;
	put_right(sk, flow);
	struct count *count = bpf_map_lookup_elem(&counts, &flow->entity);
	if (count) {
		__sync_fetch_and_add(&count->acked, sample->pkts_acked);
		if (flow->round != all->round) {
			flow->round = all->round;
			__sync_fetch_and_add(&count->seen, 1);
		}
	}
	cap(sk, flow, all);
}

SEC("struct_ops/cong_avoid")
void BPF_PROG(cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	__u32 zero = 0;
	const struct common *all = bpf_map_lookup_elem(&common, &zero);
	struct flow *flow = all ? flow_of(sk, all) : 0;

	cubictcp_cong_avoid(sk, ack, acked);
	if (flow)
		cap(sk, flow, all);
}

SEC(".struct_ops")
struct tcp_congestion_ops control = {
	.init = (void *)init,
	.ssthresh = (void *)ssthresh,
	.cong_avoid = (void *)cong_avoid,
	.set_state = (void *)set_state,
	.cwnd_event = (void *)cwnd_event,
	.pkts_acked = (void *)pkts_acked,
	.undo_cwnd = (void *)undo_cwnd,
	.name = "wt_hostrate",
};

SEC("sockops")
int choose(struct bpf_sock_ops *ops)
{
	char name[16];
	__u32 zero = 0;
	const struct common *all = bpf_map_lookup_elem(&common, &zero);

	if (!all || (ops->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && ops->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB))
		return 1;
	if (all->by == SOURCE) {
		struct prefix key = {.bits = 128};
		if (ops->family == 2) {
			__u32 address = ops->local_ip4;
			key.address[10] = key.address[11] = 0xFF;
			__builtin_memcpy(&key.address[12], &address, 4);
		} else {
			__u32 words[4] = {ops->local_ip6[0], ops->local_ip6[1], ops->local_ip6[2], ops->local_ip6[3]};
			__builtin_memcpy(key.address, words, 16);
		}
		if (!bpf_map_lookup_elem(&prefixes, &key))
			return 1;
	}
	__builtin_memcpy(name, all->name, sizeof(name));
	bpf_setsockopt(ops, 6 /* SOL_TCP */, 13 /* TCP_CONGESTION */, name, sizeof(name));
	return 1;
}
