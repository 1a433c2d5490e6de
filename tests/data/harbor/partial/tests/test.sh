#!/bin/bash
# Without a file for the reward the exit code counts.
test "$(bash add.sh 2 3)" -eq 5
