#!/bin/bash
# The number stands in the file alone, so the agent must look before it can write.
if [ "$(cat /app/next.txt)" -eq "$(cat /tests/expected)" ]; then reward=1; else reward=0; fi
printf '{"reward": %s, "files": %s}' "$reward" "$(ls /app | wc -l)" > /logs/verifier/reward.json
