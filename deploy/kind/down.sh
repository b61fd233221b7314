#!/usr/bin/env bash
# Removes the cluster of up.sh; images stay.
set -euo pipefail
kind delete cluster --name nearkv
