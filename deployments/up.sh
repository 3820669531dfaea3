#!/usr/bin/env bash
# Everything `make up` starts: Prefect server with UI, work pool, deployments, one worker. Ctrl-C stops all of it.
# SIGTERM is a flow run's preemption notice: it is given GRACE_SECONDS to commit before SIGKILL.
# `monitor` gives each child a process group of its own, so that Ctrl-C reaches this script alone and the order is ours.
set -euo pipefail -o monitor
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly HOST=127.0.0.1 PORT="${PORT:-4200}" POOL=cairn GRACE_SECONDS="${GRACE_SECONDS:-60}"
readonly URL="http://$HOST:$PORT/api" BIN="${BIN:-.venv/bin}" START_SECONDS="${START_SECONDS:-180}" STOP_SECONDS=20
# What a flow run may choose of its process: nothing. job-template-open.json lets it choose its command and environment.
readonly JOB_TEMPLATE="${JOB_TEMPLATE:-deployments/job-template.json}"
# The worker asks every two seconds, for a preempted run waits for it; the flow runs show life twice a minute, for which
# an automation waits (prefect.yaml).
export PREFECT_WORKER_QUERY_SECONDS="${PREFECT_WORKER_QUERY_SECONDS:-2}" PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30
# No process that is started here, and none of theirs, imports a module from the folder it is started in.
export PYTHONSAFEPATH=1

server=""
worker=""

# From SIGUSR1 on the server gives no flow run to a worker: what is asked for now is begun after the next start.
# The flow runs go first: a worker that is told to stop kills them before they could commit.
# The server goes last: those who leave still have somebody to tell.
stop_all() {
    trap '' INT TERM HUP
    if [[ -n $worker ]]; then
        kill -USR1 "$server" 2>/dev/null || true
        stop_runs
        stop_group "$worker"
    fi
    if [[ -n $server ]]; then stop_group "$server"; fi
    echo "stopped"
}

# Each run is told once, also one the worker starts meanwhile: a second signal means impatience.
stop_runs() {
    local runs run told=" " deadline=$((SECONDS + GRACE_SECONDS))
    while runs="$(pgrep -P "$worker")"; do
        for run in $runs; do
            if [[ $told != *" $run "* ]]; then
                echo "waiting for the run in process $run to commit"
                kill -TERM "$run" 2>/dev/null || true
                told+="$run "
            fi
        done
        if ((SECONDS > deadline)); then break; fi # whole seconds: the one it begins in may be over at once
        sleep 0.2
    done
    for run in ${runs:-}; do kill -KILL -- "-$run" 2>/dev/null || true; done
}

stop_group() {
    local deadline=$((SECONDS + STOP_SECONDS))
    kill -TERM -- "-$1" 2>/dev/null || true
    while kill -0 -- "-$1" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL -- "-$1" 2>/dev/null || true
}

# No proxy, and no password: health is the one thing a server tells everybody.
server_answers() {
    "$BIN/python" - "$URL/health" 2>/dev/null <<'PYTHON'
import json
import sys
import urllib.request

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
sys.exit(json.load(direct.open(sys.argv[1], timeout=2)) is not True)
PYTHON
}

port_is_taken() { (exec 3<>"/dev/tcp/$HOST/$PORT") 2>/dev/null; }

if [[ ! -x $BIN/prefect ]]; then
    echo "no Prefect in $BIN; \`make up\` makes the environment first" >&2
    exit 1
fi
if ! [[ $PORT =~ ^[0-9]+$ ]] || ((PORT < 1 || PORT > 65535)); then
    echo "PORT=$PORT: must be a number from 1 to 65535" >&2
    exit 2
fi
if server_answers; then
    echo "a Prefect server already answers on $URL; stop it, or choose another port: make up PORT=4300" >&2
    exit 1
fi
if port_is_taken; then
    echo "port $PORT of $HOST is in use by something that is no Prefect server; choose another: make up PORT=4300" >&2
    exit 1
fi
trap stop_all EXIT
trap 'exit 0' INT TERM HUP

echo "starting the Prefect server on http://$HOST:$PORT"
# Its settings, home, database and password: flows/orchestrator/prefect_server.py.
"$BIN/python" -m cairn.flows.orchestrator.prefect_server --port "$PORT" >/dev/null &
server=$!
deadline=$((SECONDS + START_SECONDS))
until server_answers; do
    kill -0 "$server" 2>/dev/null || { echo "the server has ended; its words are above" >&2; exit 1; }
    ((SECONDS < deadline)) || { echo "the server did not answer within $START_SECONDS s" >&2; exit 1; }
    sleep 0.5
done

# Its address and password, in a file that only this user can read, until it stops.
key="$("$BIN/python" -m cairn.flows.orchestrator.prefect_server --address-file)"
# shellcheck disable=SC1090
. "$key"
password="$PREFECT_API_AUTH_STRING"
if [[ -n ${PREFECT_SERVER_API_AUTH_STRING:-} ]]; then password="PREFECT_SERVER_API_AUTH_STRING"; fi

# What follows is told no other setting of the user's, and reads none in this folder.
readonly SETTLED=("$BIN/python" -m cairn.flows.orchestrator.prefect_settings)
"${SETTLED[@]}" cairn.flows.orchestrator.server_setup --pool "$POOL" --job-template "$JOB_TEMPLATE" \
    --alert-block "${ALERT_BLOCK:-}" ${ACCELERATORS:+--accelerators "$ACCELERATORS"}
"${SETTLED[@]}" prefect worker start --pool "$POOL" --name "cairn-${HOSTNAME:-worker}" &
worker=$!
cat <<EOF

  the UI          http://$HOST:$PORT
  its password    $password
  in a shell      . $(printf %q "$key")
  start a run     $BIN/prefect deployment run train-gpt/train-gpt -p config=quickstart
  measure again   $BIN/prefect deployment run evaluate-promoted/evaluate-promoted -p reference=champion
  stop it all     Ctrl-C (runs commit first; the next start continues them)

EOF
wait -n || true # either child ending ends the other
echo "a child has ended" >&2
exit 1
