#!/bin/bash
# PEERS=DIR peers.sh [replay options]     kvroute beside the routers of others, in front of the same mock engines.
#
# DIR is a virtual environment with them: pip install vllm-router, and pip install --no-deps sglang-router.
# KVROUTE names our command; KV_BLOCKS, ENGINES, PRESET, PORT and OUT change the setting. DILATION makes the engines so many
# times slower than the preset, so that a small machine keeps up: ask for as much less, and allow as much more. SPEED is what
# kvroute is told of their speed: a file of `kvroute calibrate`, or a preset.
set -eu
KVROUTE=${KVROUTE:-kvroute} ENGINES=${ENGINES:-4} KV_BLOCKS=${KV_BLOCKS:-10000} PORT=${PORT:-9110} OUT=${OUT:-peers.json}
PRESET=${PRESET:-llama-3-70b-a100-tp8} DILATION=${DILATION:-1} LOGS=$(mktemp -d)
SPEED=${SPEED:-$PRESET}
: "${PEERS:?the virtual environment that has vllm-router and sglang-router}"

PIDS=()
stop() { kill "${PIDS[@]}" 2>/dev/null || true; wait "${PIDS[@]}" 2>/dev/null || true; }
trap stop EXIT
launch() { "${@:2}" > "$LOGS/$1.log" 2>&1 & PIDS+=($!); }
answers() { # NAME URL: the model list comes within 60 s
    for _ in $(seq 120); do curl -sfo /dev/null "$2/v1/models" && return; sleep 0.5; done
    echo "$1 does not answer; its log:" >&2; tail -n 20 "$LOGS/$1.log" >&2; exit 1
}

URLS=(); for ((i = 1; i <= ENGINES; i++)); do URLS+=("http://127.0.0.1:$((PORT + i))"); done
launch engines "$KVROUTE" mock-engine --port $((PORT + 1)) --engines "$ENGINES" --preset "$PRESET" \
    --kv-blocks "$KV_BLOCKS" --speed "$(awk "BEGIN {print 1 / $DILATION}")" --kv-events
for url in "${URLS[@]}"; do answers engines "$url"; done

cat > "$LOGS/gateway.yaml" <<Y
port: $((PORT + 90))
policy: ttft
speed: $SPEED
workers: [$(IFS=,; echo "${URLS[*]}")]
models: {mock: {source: engine, tokenize_timeout_s: 2}}
admin: {enabled: false}
Y
launch kvroute "$KVROUTE" serve --config "$LOGS/gateway.yaml"
peer() { # NAME OFFSET COMMAND...
    launch "$1" "${@:3}" --host 127.0.0.1 --port $((PORT + $2)) --worker-urls "${URLS[@]}" \
        --prometheus-host 127.0.0.1 --prometheus-port $((PORT + $2 + 1000)) --worker-startup-check-interval 1
}
peer sglang 91 "$PEERS/bin/sglang-router" launch --policy cache_aware --log-level warn
peer vllm 92 "$PEERS/bin/vllm-router" --policy kv_aware --log-level warning
for at in kvroute:90 sglang:91 vllm:92; do answers "${at%:*}" "http://127.0.0.1:$((PORT + ${at#*:}))"; done
sleep 5 # gateways have heard of every engine

# Text: sglang-router takes no token ids. A scale of a half makes 32-token blocks of the workload's 64.
"$KVROUTE" replay --url kvroute=http://127.0.0.1:$((PORT + 90)) --url sglang/cache_aware=http://127.0.0.1:$((PORT + 91)) \
    --url vllm/kv_aware=http://127.0.0.1:$((PORT + 92)) --model mock --prompts text --workload mixed --requests 8000 \
    --rate 4 --speed 3 --scale 0.5 --limit 700 --tpot-limit 50ms --rounds 3 --json "$OUT" "$@"
