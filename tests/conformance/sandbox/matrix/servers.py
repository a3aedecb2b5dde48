"""Rows of servers and databases, with clients that stay connected."""

from __future__ import annotations

from conformance.sandbox.matrix.row import MatrixRow

_AS_POSTGRES = "setpriv --reuid=postgres --regid=postgres --clear-groups"

SERVERS: tuple[MatrixRow, ...] = (
    MatrixRow(
        "Python http.server with an open connection",
        "program",
        "the same connection answers a second request, and new ones are served",
        files=("served.py", "keepalive.py"),
        setup="echo hello > /workspace/a.txt",
        start="""
            python3 /row/keepalive.py 8000 /a.txt >/row/client &
            exec python3 /row/served.py 8000 /workspace
        """,
        ready="grep -q 'first 200' /row/client",
        check="curl -sf http://127.0.0.1:8000/a.txt | grep -q hello && pgrep -f keepalive.py",
        go_on="touch /row/again; for n in $(seq 100); do grep -q again /row/client && break; sleep 0.1; done",
        end="cat /row/client; grep -q 'again 200' /row/client",
        by_command=True,
    ),
    MatrixRow(
        "PostgreSQL with a client in a transaction, and pgbench",
        "program",
        "the open transaction commits, pgbench runs on without an error, and its sums agree",
        packages=("postgresql", "postgresql-15"),
        setup=f"""
            export PATH=$PATH:/usr/lib/postgresql/15/bin PGHOST=/row/pg PGUSER=postgres
            echo 'postgres:x:105:105::/row/pg:/bin/bash' >> /etc/passwd; echo 'postgres:x:105:' >> /etc/group
            mkdir -p /row/pg && chown postgres:postgres /row/pg && cd /row/pg &&
            {_AS_POSTGRES} initdb -A trust -D /row/pg/data >/row/initdb 2>&1 &&
            {_AS_POSTGRES} pg_ctl -w -D /row/pg/data -o '-k /row/pg -h 127.0.0.1' -l /row/pg/log start \
                >/row/started &&
            pgbench -i -q postgres 2>/dev/null && psql -qc 'create table t (n int)' && mkfifo /row/sql
        """,
        start="""
            psql -v ON_ERROR_STOP=1 < /row/sql > /row/client 2>&1 &
            exec 3> /row/sql; echo 'begin; insert into t values (1); select 1 as inserted;' >&3
            pgbench -n -c 2 -T 30 postgres > /row/pgbench 2>&1 &
            until test -e /row/go; do sleep 0.1; done
            echo 'insert into t values (2); commit; select 2 as committed;' >&3; exec 3>&-; wait
            touch /row/ended
        """,
        ready="""
            grep -q inserted /row/client &&
            test $(psql -Atc 'select count(*) from pgbench_history') -gt 20
        """,
        check="""
            test "$(psql -Atc 'select count(*) from t')" = 0 &&
            test $(psql -Atc "select count(*) from pg_stat_activity
                where state = 'idle in transaction' and query ~ 'inserted'") = 1 &&
            pgrep pgbench && ! grep -i -E 'error|fatal' /row/pgbench
        """,
        go_on="touch /row/go; until test -e /row/ended; do sleep 0.2; done",
        end="""
            cat /row/client /row/pgbench
            test "$(psql -Atc 'select sum(n) from t')" = 3 &&
            grep -q 'failed transactions: 0 ' /row/pgbench && grep -q committed /row/client &&
            test "$(psql -Atc '
                with d as (select sum(delta) as n from pgbench_history),
                     a as (select sum(abalance) as n from pgbench_accounts),
                     b as (select sum(bbalance) as n from pgbench_branches),
                     t as (select sum(tbalance) as n from pgbench_tellers)
                select d.n = a.n and a.n = b.n and b.n = t.n from a, b, d, t')" = t
        """,
        seconds=90.0,
    ),
    MatrixRow(
        "redis with a subscriber",
        "program",
        "what was set is there, and the subscriber gets what is published on the connection that it had",
        packages=("redis-server", "redis-tools"),
        start="""
            redis-server --port 6379 --save '' --appendonly yes --dir /workspace &
            until redis-cli ping; do sleep 0.05; done; redis-cli set a 1; redis-cli lpush list x y z
            exec redis-cli subscribe news > /row/news
        """,
        ready="grep -q subscribe /row/news && test $(redis-cli llen list) = 3",
        check="test $(redis-cli get a) = 1 && test $(redis-cli pubsub numsub news | tail -n 1) = 1",
        go_on="redis-cli publish news 'after it' && redis-cli incr a && redis-cli bgrewriteaof",
        end="""
            for n in $(seq 50); do grep -q 'after it' /row/news && break; sleep 0.1; done
            cat /row/news; grep -q 'after it' /row/news && test $(redis-cli get a) = 2
        """,
        by_command=True,
    ),
    MatrixRow(
        "nginx with a keep-alive client",
        "program",
        "the client's connection is answered by the same worker, which is another user; a reload works",
        packages=("nginx-light", "nginx-common"),
        files=("keepalive.py",),
        setup="""
            mkdir -p /var/log/nginx /var/lib/nginx /workspace/www && echo hello > /workspace/www/a.txt &&
            chmod 755 /workspace /workspace/www
            echo 'user www-data; worker_processes 2; pid /row/nginx.pid; events {}
                http { access_log /row/access; keepalive_timeout 300s;
                server { listen 127.0.0.1:8080; root /workspace/www; } }' > /row/nginx.conf
        """,
        start="""
            nginx -c /row/nginx.conf; exec python3 /row/keepalive.py 8080 /a.txt > /row/client
        """,
        ready="grep -q 'first 200' /row/client",
        check="""
            curl -sf http://127.0.0.1:8080/a.txt | grep -q hello &&
            test $(pgrep -u www-data nginx | wc -l) -ge 2
        """,
        go_on="touch /row/again; for n in $(seq 100); do grep -q again /row/client && break; sleep 0.1; done",
        end="""
            cat /row/client; grep -q 'again 200' /row/client && nginx -c /row/nginx.conf -s reload &&
            curl -sf http://127.0.0.1:8080/a.txt | grep -q hello
        """,
    ),
    MatrixRow(
        "SQLite in WAL mode, several processes",
        "program",
        "a writer in its transaction still keeps others out, readers see no part of it, and it commits",
        packages=("sqlite3",),
        files=("wal.py",),
        start="exec python3 /row/wal.py /workspace/data.db",
        ready="grep -q 'in the middle' /row/out",
        check="""
            test "$(sqlite3 /workspace/data.db 'select count(*) from t where who = 99')" = 0 &&
            sqlite3 -cmd '.timeout 100' /workspace/data.db 'insert into t values (7, 0)' 2>&1 | grep locked &&
            test "$(sqlite3 /workspace/data.db 'pragma integrity_check')" = ok &&
            test $(pgrep -f wal.py | wc -l) = 4
        """,
        go_on="touch /row/go; until ! pgrep -f wal.py > /dev/null; do sleep 0.05; done",
        end="""
            cat /row/out; grep -q 'all ended well' /row/out &&
            test "$(sqlite3 /workspace/data.db 'select count(*) from t where who = 99')" = 500 &&
            test "$(sqlite3 /workspace/data.db 'select count(*) from t')" = 650 &&
            test "$(sqlite3 /workspace/data.db 'pragma integrity_check')" = ok
        """,
    ),
)
