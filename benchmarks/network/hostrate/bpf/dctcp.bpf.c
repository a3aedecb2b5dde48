/* Data Center TCP (RFC 8257) for kernels that have none, and a queue that marks: what windows are compared with.
 *
 * Sender: once a window the share of what was acknowledged with marks goes into alpha (gain 1/16, in 1/1024), and
 * a marked window is cut by alpha / 2 (3.3); it grows, and answers losses, as Reno's. Receiver: acknowledgements say
 * of each packet whether it was marked; one that is held back goes before the first packet that differs (3.2).
 *
 * "mark" hangs on clsact before the interface's own queue, and marks what finds `at` packets there or more.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "GPL";

#define KERNEL __attribute__((preserve_access_index))
#define ONE 1024U
#define WIDEST (1U << 24)
#define NEEDS_ECN 2
#define DEMAND_CWR 4
#define ACK_TIMER 2
#define ACK_NOW 16

struct sock { int sk_err; } KERNEL;
struct inet_connection_sock { struct { __u8 pending; } KERNEL icsk_ack; } KERNEL;
struct tcp_sock {
	__u8 ecn_flags;
	__u32 rcv_nxt, snd_nxt, snd_una, snd_cwnd, snd_ssthresh, delivered, delivered_ce;
} KERNEL;
struct qdisc_skb_head { __u32 qlen; } KERNEL;
struct Qdisc { struct qdisc_skb_head q; } KERNEL;
struct net_device { struct Qdisc *qdisc; } KERNEL;
struct sk_buff { struct net_device *dev; } KERNEL;
enum tcp_ca_event { CA_EVENT_ECN_NO_CE = 4, CA_EVENT_ECN_IS_CE = 5 };
struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	void (*cwnd_event)(struct sock *sk, enum tcp_ca_event event);
	void (*in_ack_event)(struct sock *sk, __u32 flags);
	__u32 (*undo_cwnd)(struct sock *sk);
	void (*init)(struct sock *sk);
	char name[16];
	__u32 flags;
};

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern void *bpf_cast_to_kern_ctx(void *context) __ksym;

struct flow {
	__u32 window_ends, delivered, marked; /* when the window began */
	__u32 alpha, before_cut, threshold;
	__u32 received, was_marked; /* up to the last packet */
};
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct flow);
} flows SEC(".maps");
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __type(key, __u32); __type(value, __u32);
} at SEC(".maps");

static __always_inline struct flow *flow_of(struct sock *sk)
{
	return bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
}

/* What "ssthresh" returned was lost on its way: see window.bpf.c. */
static __always_inline void put_right(struct tcp_sock *tp, const struct flow *flow)
{
	if (flow->threshold && ((__s32)tp->snd_ssthresh < 0 || tp->snd_cwnd > WIDEST)) {
		tp->snd_ssthresh = flow->threshold;
		tp->snd_cwnd = flow->threshold;
	}
}

static __always_inline void begin_window(const struct tcp_sock *tp, struct flow *flow)
{
	flow->window_ends = tp->snd_nxt;
	flow->delivered = tp->delivered;
	flow->marked = tp->delivered_ce;
}

SEC("struct_ops/init")
void BPF_PROG(init, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *flow = flow_of(sk);

	if (!flow)
		return;
	flow->alpha = ONE;
	begin_window(tp, flow);
	flow->received = tp->rcv_nxt;
}

SEC("struct_ops/in_ack_event")
void BPF_PROG(in_ack_event, struct sock *sk, __u32 flags)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *flow = flow_of(sk);

	if (!flow)
		return;
	put_right(tp, flow);
	if ((__s32)(tp->snd_una - flow->window_ends) < 0)
		return;
	__u32 delivered = tp->delivered - flow->delivered, marked = tp->delivered_ce - flow->marked;
	__u32 less = flow->alpha >> 4;
	__u32 alpha = flow->alpha - (less ? less : flow->alpha ? 1 : 0);
	if (marked && delivered)
		alpha += marked * (ONE / 16) / delivered;
	flow->alpha = alpha < ONE ? alpha : ONE;
	begin_window(tp, flow);
}

SEC("struct_ops/ssthresh")
__u32 BPF_PROG(ssthresh, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *flow = flow_of(sk);
	__u32 alpha = ONE;

	if (flow)
		put_right(tp, flow);
	__u32 window = tp->snd_cwnd;
	if (flow) {
		alpha = flow->alpha;
		flow->before_cut = window;
	}
	__u32 cut = window - ((window * alpha) >> 11), threshold = cut > 2 ? cut : 2;
	if (flow)
		flow->threshold = threshold;
	return threshold;
}

SEC("struct_ops/undo_cwnd")
__u32 BPF_PROG(undo_cwnd, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *flow = flow_of(sk);

	return flow && flow->before_cut > tp->snd_cwnd ? flow->before_cut : tp->snd_cwnd;
}

SEC("struct_ops/cwnd_event")
void BPF_PROG(cwnd_event, struct sock *sk, enum tcp_ca_event event)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct inet_connection_sock *connection = (struct inet_connection_sock *)sk;
	struct flow *flow;
	__u32 marked = event == CA_EVENT_ECN_IS_CE;

	if ((!marked && event != CA_EVENT_ECN_NO_CE) || !(flow = flow_of(sk)))
		return;
	if (flow->was_marked != marked) {
		if (connection->icsk_ack.pending & ACK_TIMER) {
			tp->ecn_flags = flow->was_marked ? tp->ecn_flags | DEMAND_CWR : tp->ecn_flags & ~DEMAND_CWR;
			bpf_tcp_send_ack(tp, flow->received);
		}
		connection->icsk_ack.pending |= ACK_NOW;
	}
	flow->received = tp->rcv_nxt;
	flow->was_marked = marked;
	tp->ecn_flags = marked ? tp->ecn_flags | DEMAND_CWR : tp->ecn_flags & ~DEMAND_CWR;
}

SEC("struct_ops/cong_avoid")
void BPF_PROG(cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, acked);
}

SEC(".struct_ops")
struct tcp_congestion_ops control = {
	.init = (void *)init,
	.ssthresh = (void *)ssthresh,
	.cong_avoid = (void *)cong_avoid,
	.cwnd_event = (void *)cwnd_event,
	.in_ack_event = (void *)in_ack_event,
	.undo_cwnd = (void *)undo_cwnd,
	.flags = NEEDS_ECN,
	.name = "wt_dctcp",
};

SEC("tc")
int mark(struct __sk_buff *skb)
{
	__u32 zero = 0, *most = bpf_map_lookup_elem(&at, &zero);
	struct sk_buff *packet = bpf_cast_to_kern_ctx(skb);

	if (most && packet->dev->qdisc->q.qlen >= *most)
		bpf_skb_ecn_set_ce(skb);
	return TC_ACT_UNSPEC;
}
