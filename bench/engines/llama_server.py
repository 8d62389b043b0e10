#!/usr/bin/env python3
"""Runs a real llama.cpp HTTP server on loopback until it is told to end.

usage: llama_server.py MODEL.gguf PORT [SLOTS] [CONTEXT]

Prints `ready` when it listens.
"""
import os
import signal
import sys

import xllamacpp


def parameters(model, port, slots, context):
    p = xllamacpp.CommonParams()
    p.model.path = model
    p.model_alias = {"tiny"}
    p.hostnames = ["127.0.0.1"]
    p.port = port
    p.n_parallel = slots
    p.n_ctx = context
    p.n_gpu_layers = 0
    for cpu in (p.cpuparams, p.cpuparams_batch):
        cpu.n_threads = 1
    p.n_threads_http = 8
    p.endpoint_metrics = p.endpoint_slots = p.endpoint_props = True
    p.cache_prompt = True
    p.cache_ram_mib = 64
    p.use_jinja = True
    p.warmup = True
    return p


def main(model, port, slots="2", context="8192"):
    server = xllamacpp.Server(parameters(model, int(port), int(slots), int(context)))
    print("ready", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    # Its threads do not end by themselves while a client is connected.
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(*sys.argv[1:])
