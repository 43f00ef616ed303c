"""The command `llm`, told about the server as its documentation says."""

import json
import os
import subprocess
from pathlib import Path

folder = Path.cwd() / "user"
folder.mkdir(exist_ok=True)
model = {
    "model_id": "served",
    "model_name": os.environ["MODEL"],
    "api_base": os.environ["BASE_URL"],
    "api_key_name": "openai",
}
# JSON is YAML too.
(folder / "extra-openai-models.yaml").write_text(json.dumps([model]))


def llm(*arguments: str) -> str:
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    return subprocess.run(["llm", *arguments], env=environment, check=True, capture_output=True, text=True).stdout


assert "served" in llm("models")
options = ["-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "16"]
streamed = llm("What is the capital of France?", *options)
assert "Paris" in streamed, streamed
assert llm("What is the capital of France?", "--no-stream", *options) == streamed
print(streamed, end="")
assert llm("And of Italy?", "--continue", *options).strip()
assert llm("What is 2 + 2?", "--system", "You are a calculator.", *options).strip()
