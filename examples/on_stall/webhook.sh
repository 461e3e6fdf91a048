#!/bin/sh
# on_stall: one message to Slack, or to any other webhook that takes {"text": ...}.
#
#   export STALL_WEBHOOK=https://...    a secret: it is in no log line, and in no process's command line
#   export NEMO_PATCHES_ON_STALL='sh /path/to/nemo-patches/examples/on_stall/webhook.sh'
set -eu
: "${STALL_WEBHOOK:?is not set}"
message=$(python3 -c 'import json, sys; print(json.dumps({"text": json.load(sys.stdin)["text"]}))')
printf 'url = "%s"\n' "$STALL_WEBHOOK" |
    curl --config - -sSf --max-time 30 -H 'Content-Type: application/json' --data-binary "$message"
