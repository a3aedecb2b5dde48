/* The system calls that a sandbox is refused, as a classic BPF program: Docker's default denials for a container
 * without CAP_SYS_ADMIN; io_uring, which would pass under an inspector that watches system calls; and what btrfs
 * offers to the owner of a folder: a subvolume of his own would lie outside of the root's limit and its snapshots.
 * Refused calls fail with EPERM; clone3 fails with ENOSYS, because its flags lie in memory that a filter cannot
 * read, and C libraries then take clone, whose flags it can. Landlock and secret memory fail with ENOSYS, as on
 * kernels without them: no process image holds them, and what a process has given up by Landlock cannot be seen
 * from outside, so a restore would give it back in silence. */
#ifndef WINDTUNNEL_SECCOMP_H
#define WINDTUNNEL_SECCOMP_H

#include "system.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>

#if defined(__x86_64__)
#define OWN_ARCHITECTURE AUDIT_ARCH_X86_64
#else
#define OWN_ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

#define ALL_NEW_NAMESPACES 0x7e020080u /* user, pid, net, ipc, uts, cgroup, mnt, time */
#define REFUSE(code) (SECCOMP_RET_ERRNO | (code))
#define NOT_PERMITTED 1
#define NO_SUCH_CALL 38
#define NO_SUCH_PROTOCOL 93

static const uint16_t refused[] = {
    __NR_acct, __NR_add_key, __NR_bpf, __NR_clock_adjtime, __NR_clock_settime, __NR_delete_module,
    __NR_fanotify_init, __NR_finit_module, __NR_init_module, __NR_io_uring_enter, __NR_io_uring_register,
    __NR_io_uring_setup, __NR_kcmp, __NR_kexec_file_load, __NR_kexec_load, __NR_keyctl, __NR_lookup_dcookie,
    __NR_mount, __NR_move_pages, __NR_name_to_handle_at, __NR_nfsservctl, __NR_open_by_handle_at,
    __NR_perf_event_open, __NR_pivot_root, __NR_quotactl, __NR_reboot, __NR_request_key, __NR_setns,
    __NR_settimeofday, __NR_swapoff, __NR_swapon, __NR_syslog, __NR_umount2, __NR_unshare, __NR_userfaultfd,
    __NR_vhangup,
    428 /* open_tree */, 429 /* move_mount */, 430 /* fsopen */, 431 /* fsconfig */, 432 /* fsmount */,
    433 /* fspick */, 442 /* mount_setattr */, 443 /* quotactl_fd */, 467 /* open_tree_attr */,
#if defined(__x86_64__)
    __NR__sysctl, __NR_create_module, __NR_get_kernel_syms, __NR_ioperm, __NR_iopl, __NR_modify_ldt,
    __NR_query_module, __NR_sysfs, __NR_uselib, __NR_ustat,
#endif
};
#define REFUSED (sizeof refused / sizeof *refused)
#define PROGRAM_ROOM (REFUSED + 48)

#define STATEMENT(code, value) ((struct sock_filter){(code), 0, 0, (value)})
#define JUMP(code, value, yes, no) ((struct sock_filter){(code), (yes), (no), (value)})
#define LOAD(field) STATEMENT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ANSWER(value) STATEMENT(BPF_RET | BPF_K, (value))
#define EQUALS(value, skip_unless) JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, (skip_unless))

/* Writes the program and returns its length. Arguments are compared by their low word: the kernel takes only
 * that of clone's flags for namespaces, of a socket's family and of an ioctl's request. */
static unsigned filter_program(struct sock_filter *program) {
    unsigned at = 0;
    program[at++] = LOAD(arch);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, OWN_ARCHITECTURE, 1, 0);
    program[at++] = ANSWER(REFUSE(NO_SUCH_CALL));
    program[at++] = LOAD(nr);
#if defined(__x86_64__)
    program[at++] = JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1); /* the x32 numbers */
    program[at++] = ANSWER(REFUSE(NO_SUCH_CALL));
#endif
    program[at++] = EQUALS(__NR_clone, 4);
    program[at++] = LOAD(args[0]);
    program[at++] = JUMP(BPF_JMP | BPF_JSET | BPF_K, ALL_NEW_NAMESPACES, 0, 1);
    program[at++] = ANSWER(REFUSE(NOT_PERMITTED));
    program[at++] = ANSWER(SECCOMP_RET_ALLOW);
    program[at++] = EQUALS(435, 1); /* clone3 */
    program[at++] = ANSWER(REFUSE(NO_SUCH_CALL));
    program[at++] = EQUALS(444, 1); /* landlock_create_ruleset */
    program[at++] = ANSWER(REFUSE(NO_SUCH_CALL));
    program[at++] = EQUALS(447, 1); /* memfd_secret */
    program[at++] = ANSWER(REFUSE(NO_SUCH_CALL));
    program[at++] = EQUALS(__NR_socket, 10);
    program[at++] = LOAD(args[0]);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 40, 6, 0); /* vsock: reaches the hypervisor */
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 38, 5, 0); /* alg */
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 16, 0, 5); /* netlink, which is not divided by sandboxes: */
    program[at++] = LOAD(args[2]);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 9, 1, 0);  /* lines of the host's audit log */
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 15, 0, 2); /* events of the host's devices */
    program[at++] = ANSWER(REFUSE(NO_SUCH_PROTOCOL));
    program[at++] = ANSWER(REFUSE(NOT_PERMITTED));
    program[at++] = ANSWER(SECCOMP_RET_ALLOW);
    program[at++] = EQUALS(__NR_ioctl, 9);
    program[at++] = LOAD(args[1]);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x5412, 6, 0); /* TIOCSTI: types into a terminal */
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, FICLONE, 4, 0);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, FICLONERANGE, 3, 0);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, FIDEDUPERANGE, 2, 0);
    program[at++] = STATEMENT(BPF_ALU | BPF_AND | BPF_K, 0xff00);
    program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x9400, 1, 0); /* all others of btrfs */
    program[at++] = ANSWER(SECCOMP_RET_ALLOW);
    program[at++] = ANSWER(REFUSE(NOT_PERMITTED));
    for (unsigned i = 0; i < REFUSED; i++)
        program[at++] = JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i], (uint8_t)(REFUSED - i), 0);
    program[at++] = ANSWER(SECCOMP_RET_ALLOW);
    program[at++] = ANSWER(REFUSE(NOT_PERMITTED));
    return at;
}
#endif
