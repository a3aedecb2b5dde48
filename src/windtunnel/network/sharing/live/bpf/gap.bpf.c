/* The gap of every entity, before the queue of an interface: `policy/gap.py` in the kernel.
 *
 * One program for each way to tell entities apart, hung on clsact: look the entity up, then take its lock, drain
 * what its rate allowed since its last packet, and add this one or drop it. The clock is read before the lock (no
 * helper may be called under one), so another processor may have come first with a later time: then nothing
 * drains. The length is the wire's (with the headers of every segment that a large packet will become), not that
 * of the buffer. A packet that passes goes on to the filters that others hung beside (TC_ACT_UNSPEC).
 *
 * Programs "trial_*" take the packet's own time stamp as the clock, for BPF_PROG_TEST_RUN.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

#define INLINE static __always_inline
#define SHIFT 20
#define LONGEST (1ULL << 32)
#define NEVER 0xFFFFFFFFU
#define OTHERS 0
#define LEVELS 8

struct allowed {
	__u32 rate, lent; /* bytes per 2^20 ns; a rate of 0: not held back */
	__u32 limit, mark; /* bytes */
};
struct state {
	struct bpf_spin_lock lock;
	__u32 pad;
	__u64 last, gap; /* ns, 2^-20 bytes */
	__u64 passed, dropped, marked; /* bytes */
};
struct common {
	__u64 until; /* lent rates hold so long, in ns of the clock */
	__u32 levels; /* of which cgroups are entities, a bit each */
	__u32 change; /* the rest is for those who attach, set and lend */
	__u64 line;
	__u32 made, pad;
};
struct prefix {
	__u32 bits;
	__u8 address[16]; /* of IPv4 ::ffff:a.b.c.d */
};

#define MAP(name, kind, k, v) \
	struct { __uint(type, kind); __uint(max_entries, 1); __type(key, k); __type(value, v); } name SEC(".maps")
MAP(allowed, BPF_MAP_TYPE_ARRAY, __u32, struct allowed);
MAP(states, BPF_MAP_TYPE_ARRAY, __u32, struct state);
MAP(common, BPF_MAP_TYPE_ARRAY, __u32, struct common);
MAP(prefixes, BPF_MAP_TYPE_LPM_TRIE, struct prefix, __u32);
MAP(marks, BPF_MAP_TYPE_HASH, __u32, __u32);
MAP(cgroups, BPF_MAP_TYPE_HASH, __u64, __u32);

INLINE int gate(struct __sk_buff *skb, const __u32 *entity, __u64 now)
{
	__u32 zero = 0, index = entity ? *entity : OTHERS;
	struct allowed *may = bpf_map_lookup_elem(&allowed, &index);
	struct state *is = bpf_map_lookup_elem(&states, &index);
	struct common *all = bpf_map_lookup_elem(&common, &zero);
	__u64 length = skb->wire_len, more;
	int drop = 0, mark = 0;

	if (!may || !is || !all)
		return TC_ACT_UNSPEC;
	__u64 limit = (__u64)may->limit << SHIFT, mark_at = (__u64)may->mark << SHIFT;
	__u64 rate = now < all->until ? may->lent : may->rate;
	int marks = may->mark != NEVER;

	bpf_spin_lock(&is->lock);
	if (rate) {
		__u64 passed = 0, gap = is->gap;
		if (now >= is->last) {
			passed = now - is->last;
			is->last = now;
		}
		if (passed > LONGEST)
			passed = LONGEST;
		passed *= rate;
		gap = gap > passed ? gap - passed : 0;
		more = gap + (length << SHIFT);
		drop = more > limit;
		mark = !drop && marks && more > mark_at;
		is->gap = drop ? gap : more;
	}
	if (drop)
		is->dropped += length;
	else
		is->passed += length;
	if (mark)
		is->marked += length;
	bpf_spin_unlock(&is->lock);

	if (drop)
		return TC_ACT_SHOT;
	if (mark)
		bpf_skb_ecn_set_ce(skb);
	return TC_ACT_UNSPEC;
}

INLINE int by_prefix(struct __sk_buff *skb, int at4, int at6, __u64 now)
{
	struct prefix key = {.bits = 128};

	if (skb->protocol == bpf_htons(0x0800)) {
		key.address[10] = key.address[11] = 0xFF;
		if (bpf_skb_load_bytes_relative(skb, at4, &key.address[12], 4, BPF_HDR_START_NET))
			return TC_ACT_UNSPEC;
	} else if (skb->protocol == bpf_htons(0x86DD)) {
		if (bpf_skb_load_bytes_relative(skb, at6, key.address, 16, BPF_HDR_START_NET))
			return TC_ACT_UNSPEC;
	} else {
		return TC_ACT_UNSPEC; /* neighbours must be found whatever anybody sends */
	}
	return gate(skb, bpf_map_lookup_elem(&prefixes, &key), now);
}

INLINE int by_mark(struct __sk_buff *skb, __u64 now)
{
	__u32 mark = skb->mark;

	return gate(skb, bpf_map_lookup_elem(&marks, &mark), now);
}

INLINE int by_cgroup(struct __sk_buff *skb, __u64 now)
{
	__u32 zero = 0;
	struct common *all = bpf_map_lookup_elem(&common, &zero);
	const __u32 *entity = 0;

	if (!all)
		return TC_ACT_UNSPEC;
	/* the innermost that is an entity */
#pragma unroll
	for (int level = LEVELS - 1; level > 0; level--) {
		if (entity || !(all->levels & (1U << level)))
			continue;
		__u64 id = bpf_skb_ancestor_cgroup_id(skb, level);
		entity = bpf_map_lookup_elem(&cgroups, &id);
	}
	return gate(skb, entity, now);
}

#define BOTH(name, call, ...) \
	SEC("tc/" #name) int name(struct __sk_buff *skb) { return call(skb, __VA_ARGS__ bpf_ktime_get_ns()); } \
	SEC("tc/trial_" #name) int trial_##name(struct __sk_buff *skb) { return call(skb, __VA_ARGS__ skb->tstamp); }
#define AND ,

BOTH(source, by_prefix, 12 AND 8 AND)
BOTH(destination, by_prefix, 16 AND 24 AND)
BOTH(mark, by_mark, )
BOTH(cgroup, by_cgroup, )
