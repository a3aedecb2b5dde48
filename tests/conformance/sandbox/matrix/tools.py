"""Rows of the tools of a coding agent: shells, version control, builds, terminals, a browser."""

from __future__ import annotations

from conformance.sandbox.matrix.row import MatrixRow

TOOLS: tuple[MatrixRow, ...] = (
    MatrixRow(
        "bash with a background job, traps and variables",
        "program",
        "variables, directory, trap and job table are as they were; the job ends with its own status",
        setup="""
            mkdir -p /workspace/a && cd /workspace/a
            declare -A map=([k]=v)
            trap 'echo trapped' USR1
            (while [ ! -e /row/stop ]; do sleep 0.1; done; exit 7) &
        """,
        check="""
            test "${map[k]}" = v && test "$PWD" = /workspace/a && jobs -r | grep -q row/stop &&
            trap -p USR1 | grep -q trapped
        """,
        go_on="touch /row/stop",
        end="wait %1; test $? = 7",
    ),
    MatrixRow(
        "git rebase in the middle",
        "program",
        "the rebase goes on from the commit that it stood at; fsck and the history are right",
        setup="""
            export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
            git init -q /workspace/repo && cd /workspace/repo
            for n in 1 2 3 4 5 6; do echo $n >> file; git add file; git commit -qm "commit $n"; done
        """,
        start="""
            echo 'echo at >> /row/steps
                test $(wc -l < /row/steps) != 3 || read word < /row/go' > /row/step; mkfifo /row/go
            GIT_SEQUENCE_EDITOR=: exec git rebase -i --exec 'sh /row/step' HEAD~5
        """,
        ready="test -e /row/steps && test $(wc -l < /row/steps) = 3",
        check="git status | grep -q 'rebase in progress' && pgrep -f 'git rebase' && git diff --quiet",
        go_on="echo go > /row/go; until ! pgrep -f 'git rebase' >/dev/null; do sleep 0.05; done",
        end="""
            cat /row/out; git fsck --strict && test "$(git log --format=%s | head -n 1)" = 'commit 6' &&
            test $(git log --oneline | wc -l) = 6 && test "$(tr -d '\\n' < file)" = 123456 &&
            test $(wc -l < /row/steps) = 5 && test ! -e .git/rebase-merge
        """,
    ),
    MatrixRow(
        "make -j3 with gcc, in the middle",
        "program",
        "the build ends without an error, nothing is built twice, and the program prints what it must",
        packages=("gcc", "libc6-dev", "make"),
        setup=r"""
            cd /workspace
            for n in $(seq 24); do echo "int f$n(void) { return $n; }" > f$n.c; done
            { seq -f 'int f%g(void);' 24; echo '#include <stdio.h>'; echo 'int main(void) { printf("%d\n", 0'
              seq -f '+ f%g()' 24; echo '); }'; } > main.c
            cat > Makefile <<'END'
objects := $(patsubst %.c,%.o,$(wildcard *.c))
program: $(objects)
	gcc -o $@ $^
%.o: %.c
	@echo built $< >> /row/built
	gcc -O2 -c $< && sleep 0.1
END
        """,
        start="exec make -j3",
        ready="test $(wc -l < /row/built) -gt 5",
        check="pgrep make && ! grep -q Error /row/out",
        go_on="until ! pgrep make >/dev/null; do sleep 0.1; done",
        end="tail -n 3 /row/out; test $(./program) = 300 && test $(wc -l < /row/built) = 25",
    ),
    MatrixRow(
        "gcc in the middle of one large file",
        "program",
        "the same process ends with an object that links and counts right",
        packages=("gcc", "libc6-dev"),
        setup=r"""
            cd /workspace
            { for n in $(seq 700); do
                echo "unsigned f$n(unsigned x) { unsigned y = x;"
                echo "for (unsigned i = 0; i < x; i++) y ^= (y << 3) + $n * i; return y & 1; }"
              done
              echo 'int main(void) { unsigned s = 0;'
              for n in $(seq 700); do echo "s += f$n($n) + 1;"; done
              echo 'return s >= 700 && s <= 1400 ? 42 : 1; }'; } > big.c
        """,
        start="gcc -O2 -o /workspace/big /workspace/big.c; echo status $?",
        ready="test $(cat /proc/$(pgrep cc1)/stat | cut -d ' ' -f 14) -gt 30",
        check="grep -q 'status 0' /row/out || pgrep 'cc1|as|ld|collect2'",
        go_on="for n in $(seq 500); do grep -q status /row/out && break; sleep 0.1; done",
        end="cat /row/out; /workspace/big; test $? = 42",
    ),
    MatrixRow(
        "tmux with vim and an unsaved buffer",
        "program",
        "the text that is only in the editor is on the screen, and is what the editor writes",
        packages=("tmux", "vim-tiny"),
        setup="""
            export LC_ALL=C.UTF-8
            tmux -f /dev/null new-session -d -x 80 -y 24 'vim.tiny -u NONE -n /workspace/a.txt'
            tmux split-window -d 'while sleep 0.1; do date +%s%N > /row/beat; done'
            until tmux capture-pane -p | grep -q '~'; do sleep 0.05; done
            tmux send-keys 'ikept only here'
        """,
        ready="tmux capture-pane -p | grep -q 'kept only here' && test -s /row/beat",
        check="""
            tmux capture-pane -p | grep 'kept only here' && test ! -e /workspace/a.txt &&
            old=$(cat /row/beat) && sleep 0.5 && test "$old" != "$(cat /row/beat)" &&
            test "$(tmux list-panes | wc -l)" = 2
        """,
        go_on="""
            tmux send-keys ' and more' Escape ':wq' Enter
            for n in $(seq 100); do test -e /workspace/a.txt && break; sleep 0.05; done
        """,
        end="test \"$(cat /workspace/a.txt)\" = 'kept only here and more'",
    ),
    MatrixRow(
        "screen with a Python prompt",
        "program",
        "the prompt still knows its variable and answers what is typed",
        packages=("screen",),
        setup="""
            export TERM=xterm SCREENDIR=/row/screens; mkdir -m 700 /row/screens
            screen -dmS it python3 -q; sleep 0.3
            screen -S it -X stuff 'x = 6 * 7^M'
        """,
        ready="""
            screen -S it -X stuff 'open("/row/x", "w").write(str(x))^M'; sleep 0.2; grep -q 42 /row/x
        """,
        check="""
            rm -f /row/x; screen -S it -X stuff 'open("/row/x", "w").write(str(x))^M'
            for n in $(seq 100); do test -s /row/x && break; sleep 0.05; done; grep -q 42 /row/x
        """,
        go_on='screen -S it -X stuff \'x += 1; import os; os.sync(); open("/row/y", "w").write(str(x))^M\'',
        end="for n in $(seq 100); do test -s /row/y && break; sleep 0.05; done; test $(cat /row/y) = 43",
    ),
    MatrixRow(
        "ssh-agent",
        "program",
        "the agent still holds the key, whose file is gone, and signs with it",
        packages=("openssh-client",),
        setup="""
            eval "$(ssh-agent -a /row/agent)" && ssh-keygen -q -t ed25519 -N '' -f /row/key &&
            ssh-add -q /row/key && rm /row/key
        """,
        ready="ssh-add -l",
        check="""
            echo text > /row/text; rm -f /row/text.sig; ssh-keygen -Y sign -n file -f /row/key.pub /row/text
        """,
        end="ssh-add -l | grep -i ed25519 && ssh-add -d /row/key.pub && ! ssh-add -l",
    ),
    MatrixRow(
        "headless Chromium",
        "program",
        "the page's variables, its timer and its typed text are as they were, asked by its debugger",
        packages=("chromium-headless-shell",),
        files=("devtools.py",),
        setup="""
            echo '<body><input id=i><script>var kept = {n: 41}; var ticks = 0;
                setInterval(() => ticks++, 50)</script>' > /workspace/page.html
        """,
        start="""
            exec chromium-headless-shell --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                --remote-debugging-port=9222 --user-data-dir=/row/profile file:///workspace/page.html
        """,
        ready="python3 /row/devtools.py 'i.value = \"typed\"; ticks > 2 && kept.n' 41",
        check="""
            python3 /row/devtools.py 'kept.n + i.value' 41typed &&
            python3 /row/devtools.py 'new Promise(done => {
                let t = ticks; setTimeout(() => done(ticks > t), 400) })' true
        """,
        go_on="python3 /row/devtools.py 'kept.n++; document.title = \"on\"; kept.n' 42",
        end="python3 /row/devtools.py 'kept.n + document.title + i.value' 42ontyped",
        seconds=90.0,
    ),
)
