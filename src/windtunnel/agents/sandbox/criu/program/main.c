/* What runs before and within CRIU: one small static program where a shell and the tools that it starts would
 * take some milliseconds each, while a sandbox stands still.
 *
 *   steps start NETNS CACHE URGENCY WARM PROGRAM ARGUMENTS...   become PROGRAM, in that network, with the
 *                              folder CACHE on /run in mounts of its own, its session served as URGENCY says;
 *                              WARM is for `warm`. Each "-": none of that
 *   with CRTOOLS_SCRIPT_ACTION in the environment    CRIU's action script: `enter` and `hold`
 *   under the name tar         what CRIU keeps a tmpfs with and brings it back: `archive`
 *
 * It exists because a daemon with threads must not run its own code between fork and exec. */
#include "../../machine/init/system.h"

#define NEW_MOUNTS 0x00020000
#define NEW_NETWORK 0x40000000
#define BIND 4096
#define RECURSIVE 16384
#define SLAVE (1 << 19)
#define DIRECTORY 0200000
#define SEEK_CURRENT 1
#define EMPTY_PATH 0x1000
#define PATH_ROOM 4096

static int failed(const char *what, const char *name, word error) {
    char line[PATH_ROOM + 128] = "";
    append(line, sizeof line, what);
    append(line, sizeof line, name);
    append(line, sizeof line, ": error ");
    append_number(line, sizeof line, -error);
    append(line, sizeof line, "\n");
    CALL(write, 2, line, length(line));
    return 1;
}

static const char *value(char **environment, const char *name) {
    size_t size = length(name);
    for (; *environment; environment++) {
        size_t at = 0;
        while (at < size && (*environment)[at] == name[at]) at++;
        if (at == size && (*environment)[at] == '=') return *environment + size + 1;
    }
    return 0;
}

static word put(const char *file, const char *text) {
    word out = CALL(openat, AT_HERE, file, WRITE_ONLY | CLOSE_ON_EXEC);
    if (out < 0) return out;
    word written = CALL(write, out, text, length(text));
    CALL(close, out);
    return written < 0 ? written : 0;
}

/* --- start ------------------------------------------------------------------------------------------------ */

/* Milliseconds pass before the kernel moves a process to another control group, and none before the next one
 * that is moved soon after. So a process that nobody waits for is moved to where it is already (into the list
 * of processes LIST) while CRIU starts. It is nobody's child by then: CRIU takes the end of one for a failure. */
static void warm(const char *list) {
    word child = CALL(clone, SIGCHLD_, 0, 0, 0, 0);
    if (child == 0) {
        if (CALL(clone, SIGCHLD_, 0, 0, 0, 0) == 0) put(list, "0");
        CALL(exit_group, 0);
    }
    if (child > 0) CALL(wait4, child, 0, 0, 0);
}

static int start(char **of, char **environment) {
    const char *network = of[0], *cache = of[1], *urgency = of[2], *list = of[3];
    word done;
    if (!same(urgency, "-")) put("/proc/self/autogroup", urgency);
    if (!same(list, "-")) warm(list);
    if (!same(network, "-")) {
        word held = CALL(openat, AT_HERE, network, READ_ONLY | CLOSE_ON_EXEC);
        done = held < 0 ? held : CALL(setns, held, NEW_NETWORK);
        if (done < 0) return failed("cannot enter the network ", network, done);
    }
    if (!same(cache, "-")) {
        done = CALL(unshare, NEW_MOUNTS);
        if (done >= 0) done = CALL(mount, 0, "/", 0, RECURSIVE | SLAVE, 0);
        if (done >= 0) done = CALL(mount, cache, "/run", 0, BIND, 0);
        if (done < 0) return failed("cannot have on /run the folder ", cache, done);
    }
    return failed("cannot start ", of[4], CALL(execve, of[4], of + 4, environment));
}

/* --- action script ---------------------------------------------------------------------------------------- */

/* Whether the file WINDTUNNEL_WANTED is named and gone. */
static int unwanted(char **environment) {
    const char *file = value(environment, "WINDTUNNEL_WANTED");
    return file && CALL(faccessat, AT_HERE, file, 0) < 0;
}

/* The first restored process, which stands alone and of which all others are born, enters WINDTUNNEL_GROUPS:
 * lists of processes (cgroup.procs), each ending in a newline. CRIU itself is never inside. */
static int enter(char **environment) {
    const char *groups = value(environment, "WINDTUNNEL_GROUPS"), *pid = value(environment, "CRTOOLS_INIT_PID");
    char file[PATH_ROOM];
    if (unwanted(environment)) return failed("nobody wants what is restored", "", 0);
    if (groups && !pid) return failed("CRIU tells no first process", "", 0);
    while (groups && *groups) {
        size_t size = 0;
        while (*groups && *groups != '\n' && size + 1 < sizeof file) file[size++] = *groups++;
        file[size] = 0;
        if (*groups++ != '\n') return failed("no control group ", file, 0);
        word done = put(file, pid);
        if (done < 0) return failed("cannot enter the control group ", file, done);
    }
    return 0;
}

/* The numbers in LIST, each killed. */
static void end_each(const char *list) {
    char text[1 << 16];
    word in = CALL(openat, AT_HERE, list, READ_ONLY | CLOSE_ON_EXEC), got = 1, pid = 0;
    size_t size = 0;
    while (in >= 0 && size < sizeof text && (got = CALL(read, in, text + size, sizeof text - size)) > 0)
        size += (size_t)got;
    for (size_t at = 0; at < size; at++) {
        if (text[at] >= '0' && text[at] <= '9') pid = pid * 10 + (text[at] - '0');
        else if (pid) CALL(kill, pid, SIGKILL_), pid = 0;
    }
}

static const char *inside(char *path, const char *group, const char *file) {
    path[0] = 0;
    append(path, PATH_ROOM, group);
    append(path, PATH_ROOM, file);
    return path;
}

/* All is made and nothing was let go: the v2 group WINDTUNNEL_HOLD is frozen, or ended where nobody wants it
 * any more. Then CRIU goes too: it would wait for ever for a tree that is killed. */
static int hold(char **environment) {
    const char *group = value(environment, "WINDTUNNEL_HOLD");
    char path[PATH_ROOM];
    if (!group) return 0;
    word done = put(inside(path, group, "/cgroup.freeze"), "1");
    if (unwanted(environment)) {
        word criu = CALL(getppid);
        CALL(kill, criu, SIGKILL_);
        /* before Linux 5.14 one by one, which takes all that stand still */
        if (put(inside(path, group, "/cgroup.kill"), "1") < 0) end_each(inside(path, group, "/cgroup.procs"));
    }
    return done < 0 ? failed("cannot hold the control group ", group, done) : 0;
}

/* --- tar -------------------------------------------------------------------------------------------------- */

/* What is kept of an empty tmpfs, as /dev/shm mostly is: its folder alone. */
struct empty {
    char mark[16];
    uint32_t mode, uid, gid, nanoseconds;
    int64_t seconds;
};
static const char mark[16] = "windtunnel-empty";

/* statx(2) */
struct status {
    uint32_t mask, block;
    uint64_t attributes;
    uint32_t links, uid, gid;
    uint16_t mode, spare;
    uint64_t inode, size, blocks, known;
    struct {
        int64_t seconds;
        uint32_t nanoseconds;
        int32_t spare;
    } read, born, changed, written;
    uint64_t rest[18];
};

static int is_empty(word folder) {
    char entries[1024];
    /* "." and ".." take 24 bytes each */
    return CALL(getdents64, folder, entries, sizeof entries) == 48 &&
           CALL(getdents64, folder, entries, sizeof entries) == 0;
}

/* Standard input is the folder. 1 where that was enough, 0 where tar has to do it, negative on an error. */
static word keep(void) {
    struct status status;
    struct empty note;
    word folder = CALL(openat, 0, ".", READ_ONLY | DIRECTORY | CLOSE_ON_EXEC);
    if (folder < 0 || !is_empty(folder) || CALL(statx, folder, "", EMPTY_PATH, 0x7ff, &status) < 0) return 0;
    memcpy(note.mark, mark, sizeof mark);
    note.mode = status.mode & 07777;
    note.uid = status.uid;
    note.gid = status.gid;
    note.seconds = status.written.seconds;
    note.nanoseconds = status.written.nanoseconds;
    word written = CALL(write, 1, &note, sizeof note);
    return written == (word)sizeof note ? 1 : written < 0 ? written : -1;
}

/* Standard input is what was kept. */
static word bring_back(const char *folder) {
    struct empty note;
    word at = CALL(lseek, 0, 0, SEEK_CURRENT);
    if (at < 0 || CALL(pread64, 0, &note, sizeof note, at) != (word)sizeof note) return 0;
    for (size_t each = 0; each < sizeof mark; each++)
        if (note.mark[each] != mark[each]) return 0;
    int64_t times[4] = {note.seconds, note.nanoseconds, note.seconds, note.nanoseconds};
    word done = CALL(fchownat, AT_HERE, folder, note.uid, note.gid, 0);
    if (done >= 0) done = CALL(fchmodat, AT_HERE, folder, note.mode);
    if (done >= 0) done = CALL(utimensat, AT_HERE, folder, times, 0);
    return done < 0 ? done : 1;
}

/* As CRIU calls tar: `--create … --directory /proc/self/fd/0 .`, or `--extract … --directory FOLDER`. A tmpfs
 * that holds anything is for tar itself, which WINDTUNNEL_TAR names. */
static int archive(char **arguments, char **environment) {
    const char *tar = value(environment, "WINDTUNNEL_TAR"), *folder = 0;
    int create = 0, extract = 0;
    for (char **each = arguments; *each; each++) {
        if (same(*each, "--create")) create = 1;
        else if (same(*each, "--extract")) extract = 1;
        else if (same(*each, "--directory")) folder = each[1];
    }
    word done = create ? keep() : extract && folder ? bring_back(folder) : 0;
    if (done > 0) return 0;
    if (done < 0) return failed("an empty tmpfs cannot be kept or brought back", "", done);
    if (!tar) return failed("no tar is known", "", 0);
    return failed("cannot start ", tar, CALL(execve, tar, arguments, environment));
}

void entry(word *stack) {
    int count = (int)stack[0], code = 2;
    char **arguments = (char **)(stack + 1), **environment = arguments + count + 1;
    const char *step = value(environment, "CRTOOLS_SCRIPT_ACTION");
    if (count > 0 && same(arguments[0], "tar")) code = archive(arguments, environment);
    else if (count > 6 && same(arguments[1], "start")) code = start(arguments + 2, environment);
    else if (step && same(step, "setup-namespaces")) code = enter(environment);
    else if (step && same(step, "pre-resume")) code = hold(environment);
    else if (step) code = 0;
    CALL(exit_group, code);
}
