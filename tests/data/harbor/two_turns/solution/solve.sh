#!/bin/bash
echo 42 > /app/next.txt
