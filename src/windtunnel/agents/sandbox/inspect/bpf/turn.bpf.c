/* What the processes of watched sandboxes do to files, and how much they read and write.
 *
 * One program at the end of every system call, by number: look the number up first (most calls end there),
 * then the cgroup. Arguments are read at the end too: the registers of a call keep them, and by then the
 * kernel has touched the strings, so reading them cannot fault. A path is given as the kernel knows it: the
 * names from the file's (or the directory's) dentry up to the root of its file system, so nothing has to be
 * looked up in /proc of a process that may be gone. Fields of the kernel's structures are found by libbpf where
 * this kernel has them (CO-RE); one object therefore serves every kernel and both machines.
 *
 * Writes send one record for each file and epoch (the epoch moves with each snapshot), so a loop of writes
 * costs lookups only.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

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
MAP(rules, BPF_MAP_TYPE_ARRAY, __u32, struct rule, 512);
MAP(slots, BPF_MAP_TYPE_HASH, __u64, struct slot, 1024);
MAP(counts, BPF_MAP_TYPE_HASH, struct who, struct count, 65536);
MAP(written, BPF_MAP_TYPE_LRU_HASH, struct file_key, __u32, 65536);
MAP(lost, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1024);
MAP(doubts, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1024 * DOUBTS);
MAP(scratch, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct record, 1);
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 1 << 22); } ring SEC(".maps");

#define INLINE static __always_inline

/* Of the kernel's structures what is read of them; what follows ___ tells apart the machines. */
#define KERNEL __attribute__((preserve_access_index))
typedef struct { int counter; } KERNEL atomic_t;
struct super_block { __u32 s_dev; } KERNEL;
struct inode { __u16 i_mode; __u32 i_nlink; unsigned long i_ino; struct super_block *i_sb; } KERNEL;
struct qstr { const unsigned char *name; } KERNEL;
struct dentry { struct dentry *d_parent; struct qstr d_name; struct super_block *d_sb; } KERNEL;
struct path { struct dentry *dentry; } KERNEL;
struct file { struct path f_path; struct inode *f_inode; __u32 f_mode; } KERNEL;
struct fdtable { __u32 max_fds; struct file **fd; } KERNEL;
struct files_struct { struct fdtable *fdt; } KERNEL;
struct fs_struct { struct path root, pwd; } KERNEL;
struct signal_struct { atomic_t live; } KERNEL;
struct task_struct {
	struct fs_struct *fs;
	struct files_struct *files;
	struct signal_struct *signal;
	int tgid;
} KERNEL;
struct kernel_siginfo { int si_code; } KERNEL;
struct thread_info___x86 { __u32 status; } KERNEL;
struct task_struct___x86 { struct thread_info___x86 thread_info; } KERNEL;
struct pt_regs___x86 { unsigned long orig_ax, di, si, dx, r10, r8, r9; } KERNEL;
struct thread_info___arm { unsigned long flags; } KERNEL;
struct task_struct___arm { struct thread_info___arm thread_info; } KERNEL;
struct pt_regs___arm { __u64 regs[31]; __u64 orig_x0; __s32 syscallno; } KERNEL;
#define IS_X86 bpf_core_field_exists(((struct pt_regs___x86 *)0)->orig_ax)
#define TS_COMPAT 2
#define TIF_32BIT (1UL << 22)

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

INLINE struct file *file_of(struct task_struct *task, __s32 fd)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file *file = 0;
	if ((__u32)fd < BPF_CORE_READ(table, max_fds))
		bpf_probe_read_kernel(&file, sizeof(file), BPF_CORE_READ(table, fd) + (__u32)fd);
	return file;
}

INLINE __u32 device_of(struct dentry *dentry)
{
	return BPF_CORE_READ(dentry, d_sb, s_dev);
}

/* The names from a dentry up to the root of its file system, each ended by a zero byte. */
INLINE __u32 put_names(struct record *record, __u32 at, struct dentry *dentry)
{
	for (int level = 0; level < LEVELS; level++) {
		struct dentry *parent = BPF_CORE_READ(dentry, d_parent);
		if (parent == dentry || !parent)
			return at;
		if (at >= DATA)
			break;
		long n = bpf_probe_read_kernel_str(record->data + at, 256, BPF_CORE_READ(dentry, d_name.name));
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
INLINE void about_file(struct slot *slot, __u32 pid, __u32 nr, __u8 op, struct file *file)
{
	struct record *record = begun(slot, pid, nr, op);
	if (!record)
		return;
	struct dentry *dentry = BPF_CORE_READ(file, f_path.dentry);
	struct inode *inode = BPF_CORE_READ(file, f_inode);
	record->mode = BPF_CORE_READ(inode, i_mode);
	record->nlink = BPF_CORE_READ(inode, i_nlink);
	record->device1 = device_of(dentry);
	__u32 at = put_names(record, 0, dentry);
	record->end_base1 = at;
	send(record, at);
}

INLINE void written_to(struct slot *slot, __u32 pid, __u32 nr, struct file *file)
{
	struct inode *inode = BPF_CORE_READ(file, f_inode);
	if ((BPF_CORE_READ(inode, i_mode) & 0170000) != 0100000)
		return;
	struct file_key key = { (__u64)inode, BPF_CORE_READ(inode, i_ino), slot->index, 0 };
	__u32 epoch = slot->epoch, *seen = bpf_map_lookup_elem(&written, &key);
	if (seen && *seen == epoch)
		return;
	bpf_map_update_elem(&written, &key, &epoch, BPF_ANY);
	about_file(slot, pid, nr, MODIFIED, file);
}

/* An argument of a system call, of its registers; once for all callers. */
__noinline __u64 argument(__u64 regs, __u32 number)
{
	struct pt_regs___x86 *x86 = (void *)regs;
	struct pt_regs___arm *arm = (void *)regs;
	if (IS_X86) {
		switch (number) {
		case 0: return BPF_CORE_READ(x86, di);
		case 1: return BPF_CORE_READ(x86, si);
		case 2: return BPF_CORE_READ(x86, dx);
		case 3: return BPF_CORE_READ(x86, r10);
		case 4: return BPF_CORE_READ(x86, r8);
		case 5: return BPF_CORE_READ(x86, r9);
		}
		return 0;
	}
	switch (number) {
	case 0: return BPF_CORE_READ(arm, orig_x0);
	case 1: return BPF_CORE_READ(arm, regs[1]);
	case 2: return BPF_CORE_READ(arm, regs[2]);
	case 3: return BPF_CORE_READ(arm, regs[3]);
	case 4: return BPF_CORE_READ(arm, regs[4]);
	case 5: return BPF_CORE_READ(arm, regs[5]);
	}
	return 0;
}

/* The number of a system call; 512: of another table. */
INLINE __u32 number_of(__u64 regs, struct task_struct *task)
{
	if (IS_X86) {
		if (BPF_CORE_READ((struct task_struct___x86 *)task, thread_info.status) & TS_COMPAT)
			return 512;
		return BPF_CORE_READ((struct pt_regs___x86 *)regs, orig_ax);
	}
	if (BPF_CORE_READ((struct task_struct___arm *)task, thread_info.flags) & TIF_32BIT)
		return 512;
	return BPF_CORE_READ((struct pt_regs___arm *)regs, syscallno);
}

/* The directory that a path argument starts from: root, working directory, or a descriptor's. */
INLINE struct dentry *start_of(struct task_struct *task, __u64 regs, __u8 dirfd, __u64 path)
{
	char first = 0;
	if (path)
		bpf_probe_read_user(&first, 1, (void *)path);
	if (first == '/')
		return BPF_CORE_READ(task, fs, root.dentry);
	__s32 fd = dirfd == NONE ? AT_FDCWD : (__s32)argument(regs, dirfd);
	if (fd == AT_FDCWD)
		return BPF_CORE_READ(task, fs, pwd.dentry);
	struct file *file = file_of(task, fd);
	return file ? BPF_CORE_READ(file, f_path.dentry) : 0;
}

INLINE void about_paths(struct slot *slot, struct rule *rule, struct task_struct *task, __u64 regs, __u32 pid,
			__u32 nr, __u64 path1)
{
	struct record *record = begun(slot, pid, nr, rule->op);
	if (!record)
		return;
	struct dentry *dentry = start_of(task, regs, rule->dirfd1, path1);
	if (!dentry) {
		in_doubt(slot->index, CLOSED);
		return;
	}
	record->device1 = device_of(dentry);
	__u32 at = put_names(record, 0, dentry);
	record->end_base1 = at;
	if (path1)
		at = put_string(record, at, path1);
	record->end_path1 = at;
	if (rule->path2 != NONE) {
		__u64 path2 = argument(regs, rule->path2);
		dentry = start_of(task, regs, rule->dirfd2, path2);
		if (!dentry) {
			in_doubt(slot->index, CLOSED);
			return;
		}
		record->device2 = device_of(dentry);
		at = put_names(record, at, dentry);
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

SEC("raw_tracepoint/sys_exit") int sys_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 regs = ctx->args[0];
	long ret = ctx->args[1];
	__u32 nr = number_of(regs, task);
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
		struct file *file = file_of(task, argument(regs, rule->descriptor));
		if (file)
			written_to(slot, pid, nr, file);
		else
			in_doubt(slot->index, CLOSED);
		return 0;
	}
	if (ret < 0)
		return 0;
	if (kind == OPEN) {
		__u64 flags = rule->descriptor == NONE ? O_CREAT | O_TRUNC : argument(regs, rule->descriptor);
		if (rule->op) /* openat2: the flags lie in memory */
			if (bpf_probe_read_user(&flags, 8, (void *)argument(regs, rule->descriptor)))
				in_doubt(slot->index, UNREADABLE);
		if (!(flags & (O_CREAT | O_TRUNC)))
			return 0;
		struct file *file = file_of(task, ret);
		if (!file) {
			in_doubt(slot->index, CLOSED);
			return 0;
		}
		if (BPF_CORE_READ(file, f_mode) & FMODE_CREATED)
			about_file(slot, pid, nr, CREATED, file);
		else if (flags & O_TRUNC)
			written_to(slot, pid, nr, file);
		return 0;
	}
	if (kind == DESCRIPTOR) {
		struct file *file = file_of(task, argument(regs, rule->descriptor));
		if (file)
			about_file(slot, pid, nr, rule->op, file);
		else
			in_doubt(slot->index, CLOSED);
		return 0;
	}
	if (kind == MMAP) {
		__u64 flags = argument(regs, 3);
		if (!(flags & 1) || (flags & 0x20)) /* private, or of no file */
			return 0;
		struct file *file = file_of(task, argument(regs, 4));
		if (!file)
			in_doubt(slot->index, CLOSED);
		else if (BPF_CORE_READ(file, f_mode) & FMODE_WRITE)
			written_to(slot, pid, nr, file);
		return 0;
	}
	if (kind == IOCTL) {
		__u64 command = argument(regs, 1) & 0xffffffff;
		if (changes_files(command)) {
			struct file *file = file_of(task, argument(regs, 0));
			if (file)
				about_file(slot, pid, nr, MODIFIED, file);
			else
				in_doubt(slot->index, CLOSED);
		} else if (((command >> 8) & 0xff) == 0x94 && (command >> 30) != 2) {
			in_doubt(slot->index, FILE_SYSTEM_IOCTL);
		}
		return 0;
	}
	__u64 path1 = argument(regs, rule->path1);
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
	about_paths(slot, rule, task, regs, pid, nr, path1);
	return 0;
}

SEC("raw_tracepoint/sched_process_exec") int sched_process_exec(struct bpf_raw_tracepoint_args *ctx)
{
	struct slot *slot = own_slot();
	if (slot)
		counted(slot->index, bpf_get_current_pid_tgid() >> 32, 0, 0, 1);
	return 0;
}

/* The last thread of a process forgets its counts. */
SEC("raw_tracepoint/sched_process_exit") int sched_process_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)ctx->args[0];
	struct slot *slot = own_slot();
	if (!slot || BPF_CORE_READ(task, signal, live.counter))
		return 0;
	struct who who = { slot->index, bpf_get_current_pid_tgid() >> 32 };
	bpf_map_delete_elem(&counts, &who);
	return 0;
}

/* A signal that one process of a sandbox sends another is input to it; timers and the kernel's are not. */
SEC("raw_tracepoint/signal_generate") int signal_generate(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 info = ctx->args[1];
	struct slot *slot = own_slot();
	if (!slot || info == 1)
		return 0;
	if (info > 1) {
		__s32 code = BPF_CORE_READ((struct kernel_siginfo *)info, si_code);
		if (code > 0 || code == -2)
			return 0;
	}
	counted(slot->index, BPF_CORE_READ((struct task_struct *)ctx->args[2], tgid), 1, 0, 0);
	return 0;
}
