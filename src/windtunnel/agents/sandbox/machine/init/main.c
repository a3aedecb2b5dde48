/* One small static program with few roles, chosen by its first argument:
 *
 *   launch ROOT DEV CHANNEL NETNS HOST WORKDIR PROCS...   start a sandbox (launch.h); prints "pid N" or a
 *                                 sentence
 *   rootless ROOT CHANNEL HOST WORKDIR RECORD BOOT DATA PROCESSES   the same without root (rootless.h)
 *   try                           whether this user can have that
 *   init WORKDIR                  pid 1 of the sandbox (init.h)
 *
 * It exists because a daemon with threads must not run its own code between fork and exec. */
#include "system.h"

#include "init.h"
#include "launch.h"
#include "rootless.h"

void entry(word *stack) {
    int count = (int)stack[0];
    char **arguments = (char **)(stack + 1);
    char **environment = arguments + count + 1;
    int code = 2;
    if (count >= 8 && same(arguments[1], "launch")) code = launch(arguments + 2, environment);
    else if (count == 10 && same(arguments[1], "rootless")) code = launch_rootless(arguments + 2, environment);
    else if (count == 2 && same(arguments[1], "try")) code = try_rootless();
    else if (count == 3 && same(arguments[1], "init")) code = run_init(arguments[2], environment);
    CALL(exit_group, code);
}
