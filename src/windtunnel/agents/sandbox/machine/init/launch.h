/* Starts a sandbox: cgroups, namespaces, mounts, capabilities, seccomp, then pid 1.
 *
 * Mounts are made after pivot_root, so that a symbolic link in a hostile root cannot lead them out of it; what
 * has to come from the host (/dev, the channel) is taken along as a detached mount. */
#ifndef WINDTUNNEL_LAUNCH_H
#define WINDTUNNEL_LAUNCH_H

#include "seccomp.h"
#include "system.h"
#include <linux/capability.h>
#include <linux/mount.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/sockios.h>

#define NOSUID 2
#define NODEV 4
#define NOEXEC 8
#define READONLY 1
#define REMOUNT 32
#define NOATIME 1024
#define BIND 4096
#define RECURSIVE 16384
#define PRIVATE (1 << 18)
#define DETACH 2
#define CHANNEL "/.windtunnel"

/* Docker's default capabilities less mknod and net_raw. */
#define KEPT_CAPABILITIES                                                                                      \
    (1ull << CAP_CHOWN | 1ull << CAP_DAC_OVERRIDE | 1ull << CAP_FOWNER | 1ull << CAP_FSETID | 1ull << CAP_KILL | \
     1ull << CAP_SETGID | 1ull << CAP_SETUID | 1ull << CAP_SETPCAP | 1ull << CAP_NET_BIND_SERVICE |              \
     1ull << CAP_SYS_CHROOT | 1ull << CAP_AUDIT_WRITE | 1ull << CAP_SETFCAP)

static void say(const char *text) { CALL(write, 1, text, length(text)); }

/* Says what failed, with the error's number, and ends the process. */
static void fail(const char *what, word error) {
    char line[512] = "error ";
    append_number(line, sizeof line, -error);
    append(line, sizeof line, " ");
    append(line, sizeof line, what);
    append(line, sizeof line, "\n");
    say(line);
    CALL(exit_group, 1);
}
static word must(word result, const char *what) {
    if (result < 0) fail(what, result);
    return result;
}

static void need_folder(const char *path) {
    CALL(mkdirat, AT_HERE, path, 0755); /* that it exists already is the usual case */
    word at = CALL(openat, AT_HERE, path, READ_ONLY | 0200000 /* directory */ | 0400000 /* nofollow */);
    if (at < 0) {
        char line[256] = "use as a folder of the sandbox's root: ";
        append(line, sizeof line, path);
        fail(line, at);
    }
    CALL(close, at);
}

static void bind_over(const char *from, const char *to, unsigned long flags) {
    word made = CALL(mount, from, to, 0, BIND, 0);
    if (made == -2) return; /* this kernel has no such file in /proc */
    must(made, to);
    if (flags) must(CALL(mount, 0, to, 0, BIND | REMOUNT | flags, 0), to);
}

/* The list stays the same on every kernel where the file exists; walls.py has the same lists. */
static void harden_proc(const char *mask) {
    static const char *const read_only[] = {"/proc/sys",  "/proc/irq",    "/proc/bus",    "/proc/fs",
                                            "/proc/scsi", "/proc/acpi",   "/proc/driver", "/proc/asound",
                                            "/proc/dynamic_debug",        "/proc/sysrq-trigger"};
    static const char *const masked[] = {"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug",
                                         "/proc/kmsg", "/proc/kallsyms", "/proc/kpagecount", "/proc/kpageflags",
                                         "/proc/kpagecgroup", "/proc/slabinfo", "/proc/vmallocinfo", "/proc/config.gz",
                                         "/proc/latency_stats", "/proc/mtrr"};
    for (unsigned i = 0; i < sizeof read_only / sizeof *read_only; i++)
        bind_over(read_only[i], read_only[i], READONLY | NOSUID | NODEV | NOEXEC);
    for (unsigned i = 0; i < sizeof masked / sizeof *masked; i++) bind_over(mask, masked[i], 0);
}

static word taken_along(const char *folder, const char *what) {
    return must(CALL(open_tree, AT_HERE, folder, OPEN_TREE_CLONE | CLOSE_ON_EXEC), what);
}

static void put_up(word tree, const char *point, const char *what) {
    must(CALL(move_mount, tree, "", AT_HERE, point, MOVE_MOUNT_F_EMPTY_PATH), what);
    CALL(close, tree);
}

static void enter_root(const char *root, const char *devices, const char *channel) {
    must(CALL(mount, 0, "/", 0, RECURSIVE | PRIVATE, 0), "make mounts private");
    must(CALL(mount, root, root, 0, BIND | RECURSIVE, 0), "mount the root");
    word device_tree = taken_along(devices, "take /dev along");
    word channel_tree = taken_along(channel, "take the channel along");
    must(CALL(chdir, root), "enter the root");
    must(CALL(pivot_root, ".", "."), "make the root the sandbox's own");
    must(CALL(umount2, ".", DETACH), "leave the host's files");
    must(CALL(chdir, "/"), "enter the root");
    need_folder("/proc");
    need_folder("/dev");
    need_folder(CHANNEL);
    must(CALL(mount, "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, 0), "mount /proc");
    put_up(channel_tree, CHANNEL, "mount the channel");
    must(CALL(mount, 0, CHANNEL, 0, BIND | REMOUNT | NOSUID | NODEV | NOATIME, 0), "mount the channel");
    put_up(device_tree, "/dev", "mount /dev");
    must(CALL(mount, 0, "/dev", 0, BIND | REMOUNT | READONLY | NOSUID | NOEXEC, 0), "make /dev read-only");
    must(CALL(mount, "shm", "/dev/shm", "tmpfs", NOSUID | NODEV, "mode=1777,size=256m"), "mount /dev/shm");
    must(CALL(mount, "devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=0620"),
         "mount /dev/pts");
    harden_proc("/dev/masked");
}

static void set_limit(int resource, uint64_t soft, uint64_t hard) {
    uint64_t limit[2], own[2];
    must(CALL(prlimit64, 0, resource, 0, own), "read a limit");
    limit[0] = soft < own[1] ? soft : own[1];
    limit[1] = hard < own[1] ? hard : own[1];
    must(CALL(prlimit64, 0, resource, limit, 0), "set a limit");
}

static void drop_rights(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    for (int capability = 0; capability < 64; capability++) {
        if (KEPT_CAPABILITIES >> capability & 1) continue;
        word dropped = CALL(prctl, PR_CAPBSET_DROP, capability, 0, 0, 0);
        if (dropped < 0 && dropped != -22) fail("drop a capability", dropped); /* EINVAL: beyond the last */
    }
    must(CALL(prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clear ambient capabilities");
    must(CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "forbid new privileges");
    struct sock_filter program[PROGRAM_ROOM];
    struct sock_fprog filter = {(unsigned short)filter_program(program), program};
    /* The capability to install a filter goes last; no_new_privs alone would do as well. */
    must(CALL(seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter), "install the filter of system calls");
    must(CALL(capget, &header, data), "read capabilities");
    for (int half = 0; half < 2; half++) {
        uint32_t kept = (uint32_t)(KEPT_CAPABILITIES >> (32 * half)) & data[half].permitted;
        data[half] = (struct __user_cap_data_struct){kept, kept, 0};
    }
    must(CALL(capset, &header, data), "drop capabilities");
}

/* The last steps, in the root already: never returns. */
static void run_as_init(char *workdir, char **environment) {
    word null = must(CALL(openat, AT_HERE, "/dev/null", READ_WRITE), "open /dev/null");
    CALL(dup3, null, 0, 0);
    CALL(dup3, null, 2, 0);
    /* A core file would be written by the host's own handler, outside of the sandbox; a soft limit of one byte
     * keeps even a handler behind a pipe from being called. */
    set_limit(4, 1, 1);
    set_limit(7, 65536, 65536);
    CALL(umask, 022);
    drop_rights();
    char *arguments[] = {"init", "init", workdir, 0};
    /* Standard output is the line to the launcher until the exec succeeds. */
    word line = must(CALL(fcntl, 1, 1030 /* dup, close-on-exec */, 3), "keep the line to the launcher");
    CALL(dup3, null, 1, 0);
    CALL(close_range, 3, line - 1, 0);
    CALL(close_range, line + 1, ~0u, 0);
    word failed = CALL(execve, CHANNEL "/init", arguments, environment);
    CALL(dup3, line, 1, 0);
    fail("start init", failed);
}

static void become_init(char **given, char **environment) {
    static uint64_t no_signals = 0;
    CALL(rt_sigprocmask, 2, &no_signals, 0, 8);
    must(CALL(setsid), "start a session");
    must(CALL(sethostname, given[4], length(given[4])), "set the host name");
    enter_root(given[0], given[1], given[2]);
    run_as_init(given[5], environment);
}

/* Says what came of the child that becomes init: its own sentence, or its pid once the exec closed the line. */
static int report(int line, word child) {
    char text[512];
    word count = CALL(read, line, text, sizeof text - 1);
    if (count > 0) {
        CALL(write, 1, text, count);
        CALL(kill, child, SIGKILL_);
        CALL(wait4, child, 0, 0, 0);
        return 1;
    }
    char answer[64] = "pid ";
    append_number(answer, sizeof answer, child);
    append(answer, sizeof answer, "\n");
    say(answer);
    return 0;
}

static int launch(char **given, char **environment) {
    for (char **procs = given + 6; *procs; procs++) {
        word group = must(CALL(openat, AT_HERE, *procs, WRITE_ONLY | CLOSE_ON_EXEC), "open a cgroup");
        must(CALL(write, group, "0", 1), "enter a cgroup");
        CALL(close, group);
    }
    word network = must(CALL(openat, AT_HERE, given[3], READ_ONLY | CLOSE_ON_EXEC), "open the network namespace");
    must(CALL(setns, network, CLONE_NEWNET), "enter the network namespace");
    CALL(close, network);
    must(CALL(unshare, CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID), "make namespaces");
    int line[2];
    must(CALL(pipe2, line, CLOSE_ON_EXEC), "make a pipe");
    word child = must(CALL(clone, SIGCHLD_, 0, 0, 0, 0), "start a process");
    if (child == 0) {
        CALL(dup3, line[1], 1, 0);
        become_init(given, environment);
    }
    CALL(close, line[1]);
    return report(line[0], child);
}
#endif
