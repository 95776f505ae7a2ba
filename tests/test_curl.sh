#!/usr/bin/env bash
# The guide's smoke script: one curl call per endpoint of a running server.
# usage: tests/test_curl.sh [URL] [PASSWORD]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
password=${2:-}
failed=0
auth=(-H "Authorization: Bearer ${password:-none}")

# call NAME EXPECTED-TEXT CURL-ARGUMENTS...: passes when the answer is 2xx and holds the text
call() {
    local name=$1 expected=$2 answer
    shift 2
    if answer=$(curl -sS --fail-with-body --max-time 60 "${auth[@]}" "$@" 2>&1) && [[ $answer == *"$expected"* ]]; then
        echo "ok    $name"
    else
        echo "FAIL  $name: $answer" | head -c 600
        echo
        failed=1
    fi
}
post() { # NAME EXPECTED PATH BODY
    call "$1" "$2" -X POST "$url$3" -H 'Content-Type: application/json' -d "$4"
}

prompt='User: What is the capital of France?\n\nAssistant: <think>\n</think>\n'
greedy='"max_tokens": 40, "temperature": 0, "alpha_presence": 0, "alpha_frequency": 0'

call 'GET /v1/health' '"model_loaded":true' "$url/v1/health"
call 'GET /metrics' 'slots_total' "$url/metrics"
call 'GET /v1/models' 'rwkv_lightning' "$url/v1/models"
call 'GET /openai/v1/models' 'rwkv_lightning' "$url/openai/v1/models"
post 'POST /v1/chat/completions (contents)' 'rwkv7-batch' /v1/chat/completions \
    "{\"contents\": [\"$prompt\", \"$prompt\"], $greedy}"
post 'POST /v1/chat/completions (contents, stream)' 'data: [DONE]' /v1/chat/completions \
    "{\"contents\": [\"$prompt\"], $greedy, \"stream\": true}"
post 'POST /v1/chat/completions (messages)' 'chatcmpl-' /v1/chat/completions \
    '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "temperature": 0}'
post 'POST /v2/chat/completions' 'rwkv7-batch-v2' /v2/chat/completions "{\"contents\": [\"$prompt\"], $greedy}"
post 'POST /big_batch/completions' 'data: [DONE]' /big_batch/completions \
    "{\"contents\": [\"$prompt\", \"$prompt\"], \"max_tokens\": 20, \"temperature\": 0}"
post 'POST /FIM/v1/batch-FIM' 'FIM.completion' /FIM/v1/batch-FIM \
    "{\"prefix\": [\"The cat \"], \"suffix\": [\" small.\"], $greedy}"
post 'POST /translate/v1/batch-translate' 'detected_source_lang' /translate/v1/batch-translate \
    '{"source_lang": "auto", "target_lang": "zh-CN", "text_list": ["Good morning"]}'
post 'POST /openai/v1/chat/completions' 'chatcmpl-' /openai/v1/chat/completions \
    '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "temperature": 0}'
post 'POST /openai/v1/chat/completions (stream)' 'data: [DONE]' /openai/v1/chat/completions \
    '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "temperature": 0, "stream": true}'
call 'GET /v1/models/{id}' '"object":"model"' \
    "$url/v1/models/$(curl -sS "${auth[@]}" "$url/v1/models" | sed -E 's/.*"id":"([^"]*)".*/\1/')"
post 'POST /v1/completions' 'text_completion' /v1/completions \
    '{"prompt": "Once upon a time", "max_tokens": 8}'
post 'POST /state/chat/completions' 'rwkv7-state' /state/chat/completions \
    "{\"session_id\": \"smoke\", \"contents\": [\"$prompt\"], $greedy}"
post 'POST /multi_state/chat/completions' '"dialogue_idx":' /multi_state/chat/completions \
    "{\"session_id\": \"smoke\", \"dialogue_idx\": 0, \"contents\": [\"$prompt\"], $greedy}"
post 'POST /state/status' '"sessions":' /state/status '{}'
call 'GET /state/tree/{session_id}' '"branches":' "$url/state/tree/smoke"
state=$(mktemp)
trap 'rm -f "$state"' EXIT
call 'GET /state/{session_id}/export' '' -o "$state" "$url/state/smoke/export"
call 'POST /state/import' '"status":"success"' -X POST "$url/state/import?session_id=smoke-copy&replace=true" \
    -H 'Content-Type: application/octet-stream' --data-binary "@$state"
post 'POST /state/delete' '"status":"success"' /state/delete '{"session_id": "smoke", "delete_prefix": true}'
post 'POST /state/delete (copy)' '"status":"success"' /state/delete '{"session_id": "smoke-copy"}'
exit $failed
