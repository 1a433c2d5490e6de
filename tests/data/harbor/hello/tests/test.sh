#!/bin/bash
if [ "$(cat greeting.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
