"""vLLM's side of benchmarks: run by vLLM's own python, imports nothing of Rhymeflow.

    python vllm_side.py CHECKPOINT [OPTIONS]      # OPTIONS: JSON, options of `LLM` beside ours

Reads one workload a line from stdin, as JSON {prompts, lengths, temperature}; answers each with a
line `side:done` and JSON {seconds, tokens}, the tokens of each response.
"""

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    if len(sys.argv) > 2:
        options |= json.loads(sys.argv[2])
    llm = LLM(model=sys.argv[1], **options)
    print("side:ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        inputs = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        params = [
            SamplingParams(
                temperature=work["temperature"],
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            for length in work["lengths"]
        ]
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print("side:done", json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
