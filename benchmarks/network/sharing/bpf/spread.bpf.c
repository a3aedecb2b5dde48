/* A packet for an interface, again and again, each time another entity's: what a packet costs there is the
 * time of a run, less that of a run for an interface with nothing on it. */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

struct target { __u32 device, entities, first; };
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __type(key, __u32); __type(value, struct target);
} target SEC(".maps");

SEC("tc/spread")
int spread(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct target *to = bpf_map_lookup_elem(&target, &zero);

	if (!to || !to->entities)
		return TC_ACT_SHOT;
	__u32 entity = bpf_get_prandom_u32() % to->entities;
	skb->mark = entity + 1;
	skb->priority = to->first + entity; /* HTB takes it for a class */
	bpf_clone_redirect(skb, to->device, 0);
	return TC_ACT_OK;
}
