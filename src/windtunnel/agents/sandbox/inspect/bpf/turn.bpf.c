/* What the processes of watched sandboxes do to files, and how much they read and write.
 *
 * One program at the end of every system call, by number: look the number up first (most calls end there),
 * then the cgroup. Arguments are read at the end too: the registers of a call keep them, and by then the
 * kernel has touched the strings, so reading them cannot fault. A path is given as the kernel knows it: the
 * names from the file's (or the directory's) dentry up to the root of its file system, so nothing has to be
 * looked up in /proc of a process that may be gone. Offsets of kernel structures come from the kernel's own
 * type data (BTF) through the map `config`; one object therefore serves every kernel and both machines.
 *
 * Writes send one record for each file and epoch (the epoch moves with each snapshot), so a loop of writes
 * costs lookups only.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

enum kind { IGNORED, WRITE, READ, COPY, OPEN, PATH, DESCRIPTOR, MMAP, IOCTL, BIND, DOUBT };
enum op { CREATED = 1, MODIFIED, DELETED, RENAMED, METADATA };
enum doubt { FOREIGN = 0, CLOSED = 1, UNREADABLE = 2, FILE_SYSTEM_IOCTL = 3, UNCOUNTED = 10 };
enum flag { CUT = 1, NO_FILE = 2, MAKES_DIRECTORY = 4 };

#define NONE 255
#define AT_FDCWD (-100)
#define DOUBTS 16
#define DATA 16384
#define O_CREAT 0100
#define O_TRUNC 01000
#define FMODE_WRITE 2
#define FMODE_CREATED (1u << 20)
#define LEVELS 96

/* Operands are argument numbers; NONE: absent. */
struct rule { __u8 kind, op, dirfd1, path1, dirfd2, path2, descriptor, doubt; };
struct slot { __u32 index, epoch; };
struct config {
	__u32 task_fs, task_files, task_signal, task_tgid, task_foreign, foreign_mask;
	__u32 fs_root, fs_pwd, path_dentry;
	__u32 files_fdt, fdt_max, fdt_fd;
	__u32 file_path, file_inode, file_mode;
	__u32 dentry_parent, dentry_name, dentry_sb;
	__u32 inode_mode, inode_sb, inode_ino, inode_nlink;
	__u32 sb_dev, signal_live, siginfo_code;
	__u32 reg_nr, reg[6];
};
struct who { __u32 slot, pid; };
struct count { __u64 inputs, writes, execs; };
struct file_key { __u64 inode, ino; __u32 slot, pad; };
struct record {
	__u32 slot, pid;
	__u16 nr, mode;
	__u8 op, flags, pad[2];
	__u32 nlink, device1, device2;
	__u16 end_base1, end_path1, end_base2, end_path2; /* ends of the pieces in data */
	__u8 data[DATA + 4096];
};
#define HEADER 36

#define MAP(name, kind, k, v, n) \
	struct { __uint(type, kind); __uint(max_entries, n); __type(key, k); __type(value, v); } name SEC(".maps")
MAP(config, BPF_MAP_TYPE_ARRAY, __u32, struct config, 1);
MAP(rules, BPF_MAP_TYPE_ARRAY, __u32, struct rule, 512);
MAP(slots, BPF_MAP_TYPE_HASH, __u64, struct slot, 1024);
MAP(counts, BPF_MAP_TYPE_HASH, struct who, struct count, 65536);
MAP(written, BPF_MAP_TYPE_LRU_HASH, struct file_key, __u32, 65536);
MAP(lost, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1024);
MAP(doubts, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1024 * DOUBTS);
MAP(scratch, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct record, 1);
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 1 << 22); } ring SEC(".maps");

#define INLINE static __always_inline

INLINE __u64 read8(__u64 base, __u32 offset)
{
	__u64 value = 0;
	bpf_probe_read_kernel(&value, 8, (void *)(base + offset));
	return value;
}

INLINE __u32 read4(__u64 base, __u32 offset)
{
	__u32 value = 0;
	bpf_probe_read_kernel(&value, 4, (void *)(base + offset));
	return value;
}

INLINE struct config *configured(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&config, &zero);
}

INLINE struct slot *own_slot(void)
{
	__u64 id = bpf_get_current_cgroup_id();
	return bpf_map_lookup_elem(&slots, &id);
}

INLINE void missed(__u32 slot)
{
	__u64 *n = bpf_map_lookup_elem(&lost, &slot);
	if (n)
		__sync_fetch_and_add(n, 1);
}

INLINE void in_doubt(__u32 slot, __u32 doubt)
{
	__u32 key = slot * DOUBTS + (doubt & (DOUBTS - 1));
	__u64 *n = bpf_map_lookup_elem(&doubts, &key);
	if (n)
		__sync_fetch_and_add(n, 1);
}

INLINE void counted(__u32 slot, __u32 pid, __u64 inputs, __u64 writes, __u64 execs)
{
	struct who who = { slot, pid };
	struct count *count = bpf_map_lookup_elem(&counts, &who);
	if (!count) {
		struct count zero = {};
		bpf_map_update_elem(&counts, &who, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&counts, &who);
		if (!count) {
			in_doubt(slot, UNCOUNTED);
			return;
		}
	}
	if (inputs)
		__sync_fetch_and_add(&count->inputs, inputs);
	if (writes)
		__sync_fetch_and_add(&count->writes, writes);
	if (execs)
		__sync_fetch_and_add(&count->execs, execs);
}

INLINE __u64 file_of(struct config *c, __u64 task, __s32 fd)
{
	__u64 table = read8(read8(task, c->task_files), c->files_fdt);
	if ((__u32)fd >= read4(table, c->fdt_max))
		return 0;
	return read8(read8(table, c->fdt_fd) + 8 * (__u64)(__u32)fd, 0);
}

INLINE __u32 device_of(struct config *c, __u64 dentry)
{
	return read4(read8(dentry, c->dentry_sb), c->sb_dev);
}

/* The names from a dentry up to the root of its file system, each ended by a zero byte. */
INLINE __u32 put_names(struct config *c, struct record *record, __u32 at, __u64 dentry)
{
	for (int level = 0; level < LEVELS; level++) {
		__u64 parent = read8(dentry, c->dentry_parent);
		if (parent == dentry || !parent)
			return at;
		if (at >= DATA)
			break;
		__u64 name = read8(dentry, c->dentry_name);
		long n = bpf_probe_read_kernel_str(record->data + at, 256, (void *)name);
		if (n <= 0)
			break;
		at += n & 511;
		dentry = parent;
	}
	record->flags |= CUT;
	return at;
}

INLINE __u32 put_string(struct record *record, __u32 at, __u64 string)
{
	if (at >= DATA) {
		record->flags |= CUT;
		return at;
	}
	long n = bpf_probe_read_user_str(record->data + at, 4096, (void *)string);
	if (n <= 0) {
		record->flags |= CUT;
		return at;
	}
	return at + (n & 8191);
}

INLINE void send(struct record *record, __u32 size)
{
	__u64 flags = BPF_RB_NO_WAKEUP;
	if (size > DATA + 4096)
		size = DATA + 4096;
	/* the reader sleeps until an eighth of the ring is full; who asks for effects drains it anyway */
	if (bpf_ringbuf_query(&ring, BPF_RB_AVAIL_DATA) > (1 << 19))
		flags = BPF_RB_FORCE_WAKEUP;
	if (bpf_ringbuf_output(&ring, record, HEADER + size, flags))
		missed(record->slot);
}

INLINE struct record *begun(struct slot *slot, __u32 pid, __u32 nr, __u8 op)
{
	__u32 zero = 0;
	struct record *record = bpf_map_lookup_elem(&scratch, &zero);
	if (!record)
		return 0;
	record->slot = slot->index;
	record->pid = pid;
	record->nr = nr;
	record->op = op;
	record->flags = 0;
	record->mode = 0;
	record->nlink = 0;
	record->device1 = record->device2 = 0;
	record->end_path1 = record->end_base2 = record->end_path2 = 0;
	return record;
}

/* Something happened to an open file: its own path tells which. */
INLINE void about_file(struct config *c, struct slot *slot, __u32 pid, __u32 nr, __u8 op, __u64 file)
{
	struct record *record = begun(slot, pid, nr, op);
	if (!record)
		return;
	__u64 dentry = read8(file, c->file_path + c->path_dentry);
	__u64 inode = read8(file, c->file_inode);
	record->mode = read4(inode, c->inode_mode);
	record->nlink = read4(inode, c->inode_nlink);
	record->device1 = device_of(c, dentry);
	__u32 at = put_names(c, record, 0, dentry);
	record->end_base1 = at;
	send(record, at);
}

INLINE void written_to(struct config *c, struct slot *slot, __u32 pid, __u32 nr, __u64 file)
{
	__u64 inode = read8(file, c->file_inode);
	if ((read4(inode, c->inode_mode) & 0170000) != 0100000)
		return;
	struct file_key key = { inode, read8(inode, c->inode_ino), slot->index, 0 };
	__u32 epoch = slot->epoch, *seen = bpf_map_lookup_elem(&written, &key);
	if (seen && *seen == epoch)
		return;
	bpf_map_update_elem(&written, &key, &epoch, BPF_ANY);
	about_file(c, slot, pid, nr, MODIFIED, file);
}

INLINE __u64 argument(struct config *c, __u64 regs, __u8 number)
{
	return number < 6 ? read8(regs, c->reg[number]) : 0;
}

/* The directory that a path argument starts from: root, working directory, or a descriptor's. */
INLINE __u64 start_of(struct config *c, __u64 task, __u64 regs, __u8 dirfd, __u64 path)
{
	char first = 0;
	__u64 fs = read8(task, c->task_fs);
	if (path)
		bpf_probe_read_user(&first, 1, (void *)path);
	if (first == '/')
		return read8(fs, c->fs_root + c->path_dentry);
	__s32 fd = dirfd == NONE ? AT_FDCWD : (__s32)argument(c, regs, dirfd);
	if (fd == AT_FDCWD)
		return read8(fs, c->fs_pwd + c->path_dentry);
	__u64 file = file_of(c, task, fd);
	return file ? read8(file, c->file_path + c->path_dentry) : 0;
}

INLINE void about_paths(struct config *c, struct slot *slot, struct rule *rule, __u64 task, __u64 regs,
			__u32 pid, __u32 nr, __u64 path1)
{
	struct record *record = begun(slot, pid, nr, rule->op);
	if (!record)
		return;
	__u64 dentry = start_of(c, task, regs, rule->dirfd1, path1);
	if (!dentry) {
		in_doubt(slot->index, CLOSED);
		return;
	}
	record->device1 = device_of(c, dentry);
	__u32 at = put_names(c, record, 0, dentry);
	record->end_base1 = at;
	if (path1)
		at = put_string(record, at, path1);
	record->end_path1 = at;
	if (rule->path2 != NONE) {
		__u64 path2 = argument(c, regs, rule->path2);
		dentry = start_of(c, task, regs, rule->dirfd2, path2);
		if (!dentry) {
			in_doubt(slot->index, CLOSED);
			return;
		}
		record->device2 = device_of(c, dentry);
		at = put_names(c, record, at, dentry);
		record->end_base2 = at;
		at = put_string(record, at, path2);
		record->end_path2 = at;
	}
	send(record, at);
}

INLINE int changes_files(__u64 command)
{
	/* FICLONE, FICLONERANGE, FIDEDUPERANGE, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR: on the file itself */
	return command == 0x40049409 || command == 0x4020940d || command == 0xc0189436 ||
	       command == 0x40086602 || command == 0x401c5820;
}

SEC("raw_tracepoint/sys_exit") int on_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct config *c = configured();
	if (!c)
		return 0;
	__u64 regs = ctx->args[0], task = bpf_get_current_task();
	long ret = ctx->args[1];
	__u32 nr = read4(regs, c->reg_nr);
	if (read4(task, c->task_foreign) & c->foreign_mask)
		nr = 512; /* numbers of another system call table */
	struct rule *rule = bpf_map_lookup_elem(&rules, &nr);
	if (rule && rule->kind == IGNORED)
		return 0;
	struct slot *slot = own_slot();
	if (!slot)
		return 0;
	if (!rule) {
		if (nr != (__u32)-1)
			in_doubt(slot->index, FOREIGN);
		return 0;
	}
	__u32 pid = bpf_get_current_pid_tgid() >> 32;
	__u8 kind = rule->kind;
	if (kind == READ) {
		if (ret >= 0)
			counted(slot->index, pid, 1, 0, 0);
		return 0;
	}
	if (kind == WRITE || kind == COPY) {
		if (ret == -9)
			return 0;
		if (ret >= 0)
			counted(slot->index, pid, kind == COPY, 1, 0);
		if (rule->descriptor == NONE)
			return 0;
		__u64 file = file_of(c, task, argument(c, regs, rule->descriptor));
		if (file)
			written_to(c, slot, pid, nr, file);
		else
			in_doubt(slot->index, CLOSED);
		return 0;
	}
	if (ret < 0)
		return 0;
	if (kind == OPEN) {
		__u64 flags = rule->descriptor == NONE ? O_CREAT | O_TRUNC : argument(c, regs, rule->descriptor);
		if (rule->op) /* openat2: the flags lie in memory */
			if (bpf_probe_read_user(&flags, 8, (void *)argument(c, regs, rule->descriptor)))
				in_doubt(slot->index, UNREADABLE);
		if (!(flags & (O_CREAT | O_TRUNC)))
			return 0;
		__u64 file = file_of(c, task, ret);
		if (!file) {
			in_doubt(slot->index, CLOSED);
			return 0;
		}
		if (read4(file, c->file_mode) & FMODE_CREATED)
			about_file(c, slot, pid, nr, CREATED, file);
		else if (flags & O_TRUNC)
			written_to(c, slot, pid, nr, file);
		return 0;
	}
	if (kind == DESCRIPTOR) {
		__u64 file = file_of(c, task, argument(c, regs, rule->descriptor));
		if (file)
			about_file(c, slot, pid, nr, rule->op, file);
		else
			in_doubt(slot->index, CLOSED);
		return 0;
	}
	if (kind == MMAP) {
		__u64 flags = argument(c, regs, 3);
		if (!(flags & 1) || (flags & 0x20)) /* private, or of no file */
			return 0;
		__u64 file = file_of(c, task, argument(c, regs, 4));
		if (!file)
			in_doubt(slot->index, CLOSED);
		else if (read4(file, c->file_mode) & FMODE_WRITE)
			written_to(c, slot, pid, nr, file);
		return 0;
	}
	if (kind == IOCTL) {
		__u64 command = argument(c, regs, 1) & 0xffffffff;
		if (changes_files(command)) {
			__u64 file = file_of(c, task, argument(c, regs, 0));
			if (file)
				about_file(c, slot, pid, nr, MODIFIED, file);
			else
				in_doubt(slot->index, CLOSED);
		} else if (((command >> 8) & 0xff) == 0x94 && (command >> 30) != 2) {
			in_doubt(slot->index, FILE_SYSTEM_IOCTL);
		}
		return 0;
	}
	__u64 path1 = argument(c, regs, rule->path1);
	if (kind == BIND) {
		char family[3] = {};
		bpf_probe_read_user(family, 3, (void *)path1);
		if (family[0] != 1 || family[1] != 0 || family[2] == 0)
			return 0;
		path1 += 2;
	}
	if (kind == DOUBT) {
		in_doubt(slot->index, rule->doubt);
		return 0;
	}
	about_paths(c, slot, rule, task, regs, pid, nr, path1);
	return 0;
}

SEC("raw_tracepoint/sched_process_exec") int on_exec(struct bpf_raw_tracepoint_args *ctx)
{
	struct slot *slot = own_slot();
	if (slot)
		counted(slot->index, bpf_get_current_pid_tgid() >> 32, 0, 0, 1);
	return 0;
}

/* The last thread of a process forgets its counts. */
SEC("raw_tracepoint/sched_process_exit") int on_end(struct bpf_raw_tracepoint_args *ctx)
{
	struct slot *slot = own_slot();
	struct config *c = configured();
	if (!slot || !c)
		return 0;
	if (read4(read8(ctx->args[0], c->task_signal), c->signal_live))
		return 0;
	struct who who = { slot->index, bpf_get_current_pid_tgid() >> 32 };
	bpf_map_delete_elem(&counts, &who);
	return 0;
}

/* A signal that one process of a sandbox sends another is input to it; timers and the kernel's are not. */
SEC("raw_tracepoint/signal_generate") int on_signal(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 info = ctx->args[1];
	struct slot *slot = own_slot();
	struct config *c = configured();
	if (!slot || !c || info == 1)
		return 0;
	if (info > 1) {
		__s32 code = read4(info, c->siginfo_code);
		if (code > 0 || code == -2)
			return 0;
	}
	counted(slot->index, read4(ctx->args[2], c->task_tgid), 1, 0, 0);
	return 0;
}
