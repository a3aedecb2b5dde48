/* Starts a sandbox for a user without root, in a user namespace in which that user is 0 and nobody else exists.
 *
 * What a group cannot bound here is bounded by limits of each process; devices are the host's own, bound one by
 * one, because the kernel lets no user namespace make device files. The network namespace belongs to the
 * sandbox's processes and ends with them: its loopback device is all there is.
 * Pid 1 runs nothing before the launcher has written down who it is, so no sandbox can run unknown to the host. */
#ifndef WINDTUNNEL_ROOTLESS_H
#define WINDTUNNEL_ROOTLESS_H

#include "launch.h"

#define LIMIT_DATA 2
#define LIMIT_PROCESSES 6
#define CREATE_NEW 0301 /* write-only, create, exclusive */

static const char *const device_files[] = {"null", "zero", "full", "random", "urandom", "tty"};
#define DEVICES (sizeof device_files / sizeof *device_files)

static void write_file(const char *path, const char *text, const char *what) {
    word file = must(CALL(openat, AT_HERE, path, WRITE_ONLY | CLOSE_ON_EXEC), what);
    must(CALL(write, file, text, length(text)), what);
    CALL(close, file);
}

/* struct ifreq of linux/if.h, which needs a C library's headers. */
struct device_request {
    char name[16];
    short flags;
    char rest[22];
};

static void loopback_up(void) {
    struct device_request request = {{'l', 'o'}, 0, {0}};
    word plug = must(CALL(socket, 2, 2 | CLOSE_ON_EXEC, 0), "open a socket in the network namespace");
    must(CALL(ioctl, plug, SIOCGIFFLAGS, &request), "read the state of the loopback device");
    request.flags |= 1 /* up */;
    must(CALL(ioctl, plug, SIOCSIFFLAGS, &request), "bring the loopback device up");
    CALL(close, plug);
}

static void own_namespaces(void) {
    char users[64] = "0 ", groups[64] = "0 ";
    append_number(users, sizeof users, CALL(geteuid));
    append_number(groups, sizeof groups, CALL(getegid));
    append(users, sizeof users, " 1");
    append(groups, sizeof groups, " 1");
    must(CALL(unshare, CLONE_NEWUSER), "make a user namespace");
    write_file("/proc/self/setgroups", "deny", "give up groups in the user namespace");
    write_file("/proc/self/uid_map", users, "map the user into the user namespace");
    write_file("/proc/self/gid_map", groups, "map the group into the user namespace");
    must(CALL(unshare, CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET), "make namespaces");
    must(CALL(mount, 0, "/", 0, RECURSIVE | PRIVATE, 0), "make mounts private");
    loopback_up();
}

static void join(char *path, size_t size, const char *folder, const char *name) {
    path[0] = 0;
    append(path, size, folder);
    append(path, size, name);
}

/* The root of the calling process becomes `root`, with its own /proc, /dev, /dev/shm and /dev/pts. */
static void enter_own_root(const char *root, const char *channel) {
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"},
                                           {"/proc/self/fd/0", "/dev/stdin"},
                                           {"/proc/self/fd/1", "/dev/stdout"},
                                           {"/proc/self/fd/2", "/dev/stderr"},
                                           {"pts/ptmx", "/dev/ptmx"}};
    char path[64];
    word devices[DEVICES];
    must(CALL(mount, root, root, 0, BIND | RECURSIVE, 0), "mount the root");
    for (unsigned i = 0; i < DEVICES; i++) {
        join(path, sizeof path, "/dev/", device_files[i]);
        devices[i] = taken_along(path, path);
    }
    word channel_tree = taken_along(channel, "take the channel along");
    must(CALL(chdir, root), "enter the root");
    must(CALL(pivot_root, ".", "."), "make the root the sandbox's own");
    /* /proc before the host's files are left: the kernel wants to see a whole one */
    need_folder("/proc");
    must(CALL(mount, "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, 0), "mount /proc");
    must(CALL(umount2, ".", DETACH), "leave the host's files");
    must(CALL(chdir, "/"), "enter the root");
    need_folder(CHANNEL);
    put_up(channel_tree, CHANNEL, "mount the channel");
    need_folder("/dev");
    must(CALL(mount, "dev", "/dev", "tmpfs", NOSUID | NOEXEC, "mode=755,size=64k"), "mount /dev");
    for (unsigned i = 0; i < DEVICES; i++) {
        join(path, sizeof path, "/dev/", device_files[i]);
        word file = must(CALL(openat, AT_HERE, path, CREATE_NEW | CLOSE_ON_EXEC, 0666), path);
        CALL(close, file);
        put_up(devices[i], path, path);
    }
    for (unsigned i = 0; i < sizeof links / sizeof *links; i++)
        must(CALL(symlinkat, links[i][0], AT_HERE, links[i][1]), links[i][1]);
    need_folder("/dev/shm");
    need_folder("/dev/pts");
    must(CALL(mount, "shm", "/dev/shm", "tmpfs", NOSUID | NODEV, "mode=1777,size=256m"), "mount /dev/shm");
    must(CALL(mount, "devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=0620"),
         "mount /dev/pts");
    must(CALL(mount, 0, "/dev", 0, BIND | REMOUNT | READONLY | NOSUID | NOEXEC, 0), "make /dev read-only");
    harden_proc("/dev/null");
}

static uint64_t number(const char *text) {
    uint64_t value = 0;
    while (*text >= '0' && *text <= '9') value = value * 10 + (uint64_t)(*text++ - '0');
    return value;
}

/* Field 22 of /proc/PID/stat: when the process started, in ticks since boot. */
static uint64_t start_ticks(word pid) {
    char path[64] = "/proc/", text[1024];
    append_number(path, sizeof path, pid);
    append(path, sizeof path, "/stat");
    word file = must(CALL(openat, AT_HERE, path, READ_ONLY | CLOSE_ON_EXEC), "look at the first process");
    word count = must(CALL(read, file, text, sizeof text - 1), "look at the first process");
    CALL(close, file);
    text[count] = 0;
    char *at = text + count;
    while (at > text && *at != ')') at--;
    for (int field = 2; field < 22 && *at; at++)
        if (*at == ' ') field++;
    return number(at);
}

/* Writes "PID TICKS BOOT" into the file, in one step. */
static void write_down(const char *file, word pid, const char *boot) {
    char line[256] = "", part[4096];
    append_number(line, sizeof line, pid);
    append(line, sizeof line, " ");
    append_number(line, sizeof line, (word)start_ticks(pid));
    append(line, sizeof line, " ");
    append(line, sizeof line, boot);
    join(part, sizeof part, file, ".part");
    word out = must(CALL(openat, AT_HERE, part, WRITE_ONLY | 01100 /* create, truncate */ | CLOSE_ON_EXEC, 0600),
                    "write down who the first process is");
    must(CALL(write, out, line, length(line)), "write down who the first process is");
    CALL(close, out);
    must(CALL(renameat, AT_HERE, part, AT_HERE, file), "write down who the first process is");
}

/* ROOT CHANNEL HOST WORKDIR RECORD BOOT DATA PROCESSES; a limit of 0 is none. */
static int launch_rootless(char **given, char **environment) {
    int line[2], leave[2];
    own_namespaces();
    must(CALL(pipe2, line, CLOSE_ON_EXEC), "make a pipe");
    must(CALL(pipe2, leave, CLOSE_ON_EXEC), "make a pipe");
    word child = must(CALL(clone, SIGCHLD_, 0, 0, 0, 0), "start a process");
    if (child == 0) {
        char byte;
        static uint64_t no_signals = 0;
        CALL(dup3, line[1], 1, 0);
        CALL(close, leave[1]);
        if (CALL(read, leave[0], &byte, 1) != 1) CALL(exit_group, 1);
        CALL(rt_sigprocmask, 2, &no_signals, 0, 8);
        must(CALL(setsid), "start a session");
        must(CALL(sethostname, given[2], length(given[2])), "set the host name");
        enter_own_root(given[0], given[1]);
        uint64_t data = number(given[6]), processes = number(given[7]);
        if (data) set_limit(LIMIT_DATA, data, data);
        if (processes) set_limit(LIMIT_PROCESSES, processes, processes);
        run_as_init(given[3], environment);
    }
    CALL(close, line[1]);
    write_down(given[4], child, given[5]);
    must(CALL(write, leave[1], "g", 1), "let the first process go");
    return report(line[0], child);
}

/* Whether this user can have all that: does it, with the host's own root, and leaves nothing. */
static int try_rootless(void) {
    own_namespaces();
    word child = must(CALL(clone, SIGCHLD_, 0, 0, 0, 0), "start a process");
    if (child == 0) {
        must(CALL(mount, "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, 0), "mount /proc");
        must(CALL(mount, "try", "/proc", "tmpfs", NOSUID | NODEV, 0), "mount a file system");
        CALL(exit_group, 0);
    }
    int status = 0;
    CALL(wait4, child, &status, 0, 0);
    return status ? 1 : 0;
}
#endif
