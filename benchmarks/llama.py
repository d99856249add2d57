"""llama.cpp's forward on a random Llama, for benchmarks/forward.py. It needs `pip install llama-cpp-python gguf` alone.

    python benchmarks/llama.py DTYPE LAYERS HEADS DIM FFN_DIM VOCABULARY

For each line [rows, threads, seconds] of its input it prints the milliseconds of forwards that read that many tokens of
one sequence, after 128 others, with all their logits.
"""
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter, thread_time

import gguf
import llama_cpp
import numpy as np

CONTEXT = 128


def write(file: str, dtype: str, layers: int, heads: int, dim: int, ffn_dim: int, vocabulary: int) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn_dim)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}".encode() for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([1] * vocabulary)
    numbers = np.random.default_rng(0).standard_normal(max(vocabulary, ffn_dim) * dim, dtype=np.float32) * 0.02
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    def add(name, *shape):
        if dtype == "float32":
            writer.add_tensor(name, numbers[:np.prod(shape)].reshape(shape))
        else:
            writer.add_tensor(name, bits[:2 * np.prod(shape)].reshape(*shape[:-1], -1),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", vocabulary, dim)
    add("output.weight", vocabulary, dim)
    writer.add_tensor("output_norm.weight", np.ones(dim, np.float32))
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(dim, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", dim, dim)
        add(f"blk.{layer}.ffn_gate.weight", ffn_dim, dim)
        add(f"blk.{layer}.ffn_up.weight", ffn_dim, dim)
        add(f"blk.{layer}.ffn_down.weight", dim, ffn_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    dtype, *sizes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        write(file := str(Path(folder, "random.gguf")), dtype, *map(int, sizes))
        model = llama_cpp.Llama(file, n_ctx=512, n_batch=CONTEXT, verbose=False)
    context, batch = model.ctx, llama_cpp.llama_batch_init(CONTEXT, 0, 1)

    def read(first, rows):
        batch.n_tokens = rows
        for i in range(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 7 + i, first + i, 1, 1
            batch.seq_id[i][0] = 0
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        llama_cpp.llama_get_logits(context)

    read(0, CONTEXT)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        rows, threads, seconds = json.loads(line)
        llama_cpp.llama_set_n_threads(context, threads, threads)
        times, start, now = [], perf_counter(), thread_time if threads == 1 else perf_counter
        while len(times) < 2 or perf_counter() - start < seconds:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, CONTEXT, -1)
            begin = now()
            read(CONTEXT, rows)
            times.append(1e3 * (now() - begin))
        print(json.dumps(times[1:]), flush=True)


if __name__ == "__main__":
    main()
