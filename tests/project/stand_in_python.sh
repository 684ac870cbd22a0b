#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
    '-m venv '*) mkdir -p "$VENV/bin" && cp "$0" "$VENV/bin/python" ;;
    *'import transformer_engine'*) [ "$TE" = yes ] ;;
    *"find_spec('$LACKS')"*) exit 1 ;;
    *"$HANGS"*) sleep 60 ;;
    '-m pytest'*)
        echo '=== 3 passed in 0.1s ==='
        case "$*" in *"$FAILS"*) exit 1 ;; esac
        ;;
    scripts/benchmark_gpt.py*) echo 'a table' ;;
    -c*) echo Python 3 ;;
esac
