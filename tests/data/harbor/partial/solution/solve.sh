#!/bin/bash
sed -i s/-/+/ /app/add.sh
