/* Pid 1 of a sandbox: reaps, and starts persistent shells.
 *
 * Requests are lines in the FIFO /.windtunnel/requests:  "start NAME\n".
 * The folder /.windtunnel/NAME has two FIFOs: `in`, the script that the shell reads, and `ack`, read by the host.
 * Init holds both open for as long as it lives, so neither end ever waits for the other to exist and what is
 * in flight survives the death of the host's daemon. Into `ack` it writes "born PID PROGRAM\n" when the shell runs
 * and "dead STATUS\n" (as of wait) when it has ended. */
#ifndef WINDTUNNEL_INIT_H
#define WINDTUNNEL_INIT_H

#include "system.h"

#define SHELLS 64
#define NAME_ROOM 64
#define SIGNALS 64

struct shell {
    char name[NAME_ROOM];
    word pid;
    word in, ack;
};

static struct shell shells[SHELLS];

struct kernel_action {
    void (*handler)(int);
    unsigned long flags;
    void (*restorer)(void);
    uint64_t mask;
};

static void on_child(int signal) { (void)signal; }

#if defined(__x86_64__)
void returned(void);
__asm__("returned:\n mov $15, %eax\n syscall\n");
#endif

static void channel_path(char *path, const char *name, const char *file) {
    path[0] = 0;
    append(path, 160, "/.windtunnel/");
    append(path, 160, name);
    append(path, 160, "/");
    append(path, 160, file);
}

static void tell(const struct shell *shell, const char *word_, word number, const char *more) {
    char line[128] = "";
    append(line, sizeof line, word_);
    append_number(line, sizeof line, number);
    append(line, sizeof line, more);
    append(line, sizeof line, "\n");
    CALL(write, shell->ack, line, length(line));
}

static struct shell *find(const char *name) {
    struct shell *empty = 0;
    for (int i = 0; i < SHELLS; i++) {
        if (same(shells[i].name, name)) return &shells[i];
        if (!shells[i].name[0] && !empty) empty = &shells[i];
    }
    return empty;
}

static void start_shell(const char *name, const char *workdir, char **environment) {
    struct shell *shell = find(name);
    if (!shell || shell->pid) return;
    char in[160], ack[160];
    channel_path(in, name, "in");
    channel_path(ack, name, "ack");
    /* A shell that is started anew may find its FIFOs replaced: open what is there now. */
    if (shell->name[0]) CALL(close, shell->in), CALL(close, shell->ack);
    shell->name[0] = 0;
    shell->in = CALL(openat, AT_HERE, in, READ_WRITE | CLOSE_ON_EXEC | 04000);
    shell->ack = CALL(openat, AT_HERE, ack, READ_WRITE | CLOSE_ON_EXEC | 04000);
    if (shell->in < 0 || shell->ack < 0) return;
    append(shell->name, NAME_ROOM, name);
    char *program = CALL(faccessat, AT_HERE, "/bin/bash", 1) == 0 ? "/bin/bash" : "/bin/sh";
    char *bash[] = {"bash", "--norc", "--noprofile", in, 0};
    char *sh[] = {"sh", in, 0};
    word child = CALL(clone, SIGCHLD_, 0, 0, 0, 0);
    if (child == 0) {
        uint64_t none = 0;
        CALL(rt_sigprocmask, 2, &none, 0, 8);
        /* What is ignored stays so over an exec, and a shell cannot undo it: who started the host by nohup or in the
         * background of a script would have commands that no SIGINT interrupts. */
        static const struct kernel_action usual;
        for (word one = 1; one <= SIGNALS; one++) CALL(rt_sigaction, one, &usual, 0, 8);
        CALL(setsid);
        if (CALL(chdir, workdir) < 0) CALL(chdir, "/");
        CALL(execve, program, program[5] == 'b' ? bash : sh, environment);
        CALL(exit_group, 127);
    }
    shell->pid = child > 0 ? child : 0;
    if (child > 0) tell(shell, "born ", child, program[5] == 'b' ? " bash" : " sh");
    else tell(shell, "dead ", 127 << 8, "");
}

static void reap(void) {
    int status;
    word pid;
    while ((pid = CALL(wait4, -1, &status, 1 /* no hang */, 0)) > 0)
        for (int i = 0; i < SHELLS; i++)
            if (shells[i].pid == pid) {
                shells[i].pid = 0;
                tell(&shells[i], "dead ", status, "");
            }
}

static void obey(char *line, const char *workdir, char **environment) {
    static const char start[] = "start ";
    for (int i = 0; i < 6; i++)
        if (line[i] != start[i]) return;
    char *name = line + 6;
    for (char *at = name; *at; at++)
        if (*at == '/' || *at == '.') return;
    if (*name && length(name) < NAME_ROOM) start_shell(name, workdir, environment);
}

static int run_init(const char *workdir, char **environment) {
    uint64_t child_signal = 1ull << (SIGCHLD_ - 1), none = 0;
    struct kernel_action action = {on_child, 0, 0, 0};
#if defined(__x86_64__)
    action.flags = 0x04000000;
    action.restorer = returned;
#endif
    CALL(rt_sigprocmask, 2, &child_signal, 0, 8);
    CALL(rt_sigaction, SIGCHLD_, &action, 0, 8);
    word requests = CALL(openat, AT_HERE, "/.windtunnel/requests", READ_WRITE | CLOSE_ON_EXEC | 04000);
    if (requests < 0) return 1;
    char text[1024];
    size_t held = 0;
    for (;;) {
        reap();
        struct { int fd; short wanted, seen; } wait = {(int)requests, 1, 0};
        if (CALL(ppoll, &wait, 1, 0, &none, 8) < 0) continue;
        word count = CALL(read, requests, text + held, sizeof text - 1 - held);
        if (count <= 0) continue;
        held += (size_t)count;
        size_t begin = 0;
        for (size_t at = 0; at < held; at++)
            if (text[at] == '\n') {
                text[at] = 0;
                obey(text + begin, workdir, environment);
                begin = at + 1;
            }
        held -= begin;
        memcpy(text, text + begin, held); /* downwards, byte by byte: may overlap */
        if (held == sizeof text - 1) held = 0;
    }
}
#endif
