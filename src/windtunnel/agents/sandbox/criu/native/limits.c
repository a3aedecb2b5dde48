/* Read limits of processes of other users without CAP_SYS_RESOURCE: a library that is loaded before CRIU's own.
 *
 * prlimit(2) shows the limits of a process of another uid or gid only to who has that capability, and a root of
 * a container often lacks it; /proc/PID/limits shows the same numbers to everybody. So where the kernel refuses
 * a mere read, they are read there: one line for each resource, in the order of their numbers, after a headline;
 * soft and hard limit in columns from the 27th character on (linux/fs/proc/base.c, proc_pid_limits).
 *
 * CRIU asks by syscall(2) (criu/cr-dump.c, dump_task_rlimits), others by prlimit(3). Of the C library only the
 * place of errno is used, so one build serves every C library of a processor. */
#include <stdarg.h>
#include <stdint.h>

#define REFUSED 1 /* EPERM */
#define UNLIMITED (~(uint64_t)0)
#define VALUES 26

struct limit {
    uint64_t soft, hard;
};

int *__errno_location(void);

#if defined(__x86_64__)
enum { READ = 0, CLOSE = 3, OPENAT = 257, PRLIMIT = 302 };
static long call(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
enum { READ = 63, CLOSE = 57, OPENAT = 56, PRLIMIT = 261 };
static long call(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}
#else
#error "no system calls are known for this processor"
#endif

static const char *value(const char *at, uint64_t *into) {
    while (*at == ' ')
        at++;
    if (*at == 'u') { /* unlimited */
        *into = UNLIMITED;
        return at + 9;
    }
    if (*at < '0' || *at > '9')
        return 0;
    uint64_t number = 0;
    for (; *at >= '0' && *at <= '9'; at++)
        number = number * 10 + (uint64_t)(*at - '0');
    *into = number;
    return at;
}

/* 0, or the negative number of an error: REFUSED where the file does not say it. */
__attribute__((noinline)) static long shown(long pid, unsigned resource, struct limit *limit) {
    char path[40] = "/proc/", digits[20], text[4096];
    unsigned length = 0, at = 6;
    for (long rest = pid; rest > 0 && length < sizeof digits; rest /= 10)
        digits[length++] = (char)('0' + rest % 10);
    while (length > 0)
        path[at++] = digits[--length];
    for (const char *name = "/limits"; *name; name++)
        path[at++] = *name;
    path[at] = 0;
    long file = call(OPENAT, -100, (long)path, 0, 0, 0, 0);
    if (file < 0)
        return file;
    long size = 0, got;
    while (size < (long)sizeof text - 1 &&
           (got = call(READ, file, (long)(text + size), (long)sizeof text - 1 - size, 0, 0, 0)) > 0)
        size += got;
    call(CLOSE, file, 0, 0, 0, 0, 0);
    text[size] = 0;
    const char *line = text;
    for (unsigned skip = resource + 1; skip > 0; skip--) {
        while (*line && *line != '\n')
            line++;
        if (!*line++)
            return -REFUSED;
    }
    for (unsigned i = 0; i < VALUES; i++)
        if (!line[i] || line[i] == '\n')
            return -REFUSED;
    struct limit found;
    if (!(line = value(line + VALUES, &found.soft)) || !value(line, &found.hard))
        return -REFUSED;
    *limit = found;
    return 0;
}

static long answer(long number, long a, long b, long c, long d, long e, long f) {
    long result = call(number, a, b, c, d, e, f);
    if (number == PRLIMIT && result == -REFUSED && !c && d && a > 0)
        result = shown(a, (unsigned)b, (struct limit *)d);
    if (result < 0 && result >= -4095) {
        *__errno_location() = (int)-result;
        return -1;
    }
    return result;
}

long syscall(long number, ...) {
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    return answer(number, a, b, c, d, e, f);
}

int prlimit(int pid, int resource, const struct limit *new, struct limit *old) {
    return (int)answer(PRLIMIT, pid, resource, (long)new, (long)old, 0, 0);
}

int prlimit64(int pid, int resource, const struct limit *new, struct limit *old) {
    return prlimit(pid, resource, new, old);
}
