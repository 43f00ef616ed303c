"""guidellm's benchmark, with synthetic prompts."""

import json
import os
import subprocess
from pathlib import Path

url = os.environ["BASE_URL"].removesuffix("/v1")
for route in ("chat/completions", "completions"):
    results = Path.cwd() / f"{route.replace('/', '-')}.json"
    command = ["guidellm", "run", "--disable-console", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={url},request_format=/v1/{route}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['MODEL_FOLDER']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    command += ["--constraint", "kind=max_requests,count=4", "--output", f"kind=json,path={results}"]
    subprocess.run(command, check=True)
    [benchmark] = json.loads(results.read_text())["benchmarks"]
    made = benchmark["metrics"]["request_totals"]
    # On a busy machine guidellm may end before it has read the last answer from its own worker.
    assert made["successful"] >= 3, made
    assert made["errored"] == made["incomplete"] == 0, made
    tokens = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
    print(f"/v1/{route}: {made['successful']} requests of {tokens} tokens")
    assert tokens == 16
