/* System calls without a C library: the program that becomes pid 1 of a sandbox is a few pages, has no thread
 * state, no vDSO pointers and no locale, so a process image of it is small and fits any host.
 * Functions return the kernel's value: negative is -errno. */
#ifndef WINDTUNNEL_SYSTEM_H
#define WINDTUNNEL_SYSTEM_H

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <asm/unistd_64.h>
#else
/* as this processor's own asm/unistd.h does */
#define __ARCH_WANT_RENAMEAT
#define __ARCH_WANT_TIME32_SYSCALLS
#include <asm-generic/unistd.h>
#endif

typedef long word;

#if defined(__x86_64__)
static inline word system6(word number, word a, word b, word c, word d, word e, word f) {
    word result;
    register word r10 __asm__("r10") = d;
    register word r8 __asm__("r8") = e;
    register word r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call entry\n hlt\n");
#elif defined(__aarch64__)
static inline word system6(word number, word a, word b, word c, word d, word e, word f) {
    register word x8 __asm__("x8") = number;
    register word x0 __asm__("x0") = a;
    register word x1 __asm__("x1") = b;
    register word x2 __asm__("x2") = c;
    register word x3 __asm__("x3") = d;
    register word x4 __asm__("x4") = e;
    register word x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x0, sp\n bl entry\n brk #0\n");
#else
#error "no system calls for this processor"
#endif

#define CALL(name, ...) CALL_(__NR_##name, ##__VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define CALL_(number, a, b, c, d, e, f, ...) \
    system6(number, (word)(a), (word)(b), (word)(c), (word)(d), (word)(e), (word)(f))

/* The compiler may call these by itself. */
__attribute__((used)) static void *memset(void *to, int byte, size_t count) {
    volatile char *at = to;
    while (count--) *at++ = (char)byte;
    return to;
}
__attribute__((used)) static void *memcpy(void *to, const void *from, size_t count) {
    volatile char *at = to;
    const char *source = from;
    while (count--) *at++ = *source++;
    return to;
}

static size_t length(const char *text) {
    size_t count = 0;
    while (text[count]) count++;
    return count;
}
static int same(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}
/* Appends to a line of bounded size, always ending in a zero. */
static void append(char *line, size_t size, const char *text) {
    size_t at = length(line);
    while (*text && at + 1 < size) line[at++] = *text++;
    line[at] = 0;
}
static void append_number(char *line, size_t size, word number) {
    char digits[24];
    int at = 23;
    unsigned long rest = number < 0 ? -(unsigned long)number : (unsigned long)number;
    digits[at] = 0;
    do digits[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0) digits[--at] = '-';
    append(line, size, digits + at);
}

#define AT_HERE (-100)
#define READ_ONLY 0
#define WRITE_ONLY 1
#define READ_WRITE 2
#define CLOSE_ON_EXEC 02000000
#define SIGKILL_ 9
#define SIGCHLD_ 17

/* Where the program begins: the stack holds the number of arguments, the arguments, the environment. */
void entry(word *stack);
#endif
