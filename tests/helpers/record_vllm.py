"""Records what vLLM's servers answer to this library, into `vllm_recording.json` beside it.

    python -m tests.helpers.record_vllm

wants an environment with vLLM for a CPU, takes a few minutes, and starts two servers of the tiny
model. Requests are those of the rollout itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from grpo_kernels.training.vllm_server import Server, server_command
from tests.helpers.recorded_vllm import (
    MASKED,
    MASKS,
    RECORDING,
    SAMPLING,
    config_for,
    make_folder,
    rollout_of,
    sample,
)

# Sampling masks come from a Triton kernel. Where Triton has no driver, this shows vLLM one, and
# Triton's interpreter runs the kernel; that of top-k and top-p, which it cannot run, is left out.
SHIM = {
    "sitecustomize.py": """
import types
import triton.backends
driver = types.SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
""",
    "interpreted.py": """
import vllm.v1.sample.ops.topk_topp_sampler as sampler
from grpo_kernels.integrations.vllm import WorkerExtension
sampler.HAS_TRITON = False
""",
}


@contextmanager
def serving(command, environment):
    """A server, of which the client waits until it answers."""
    process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def record(config, sampling):
    """The exchanges of a run's requests, without those that differ from run to run."""
    exchanges, call = [], Server._call

    def recorded(server, path, body=None, timeout=None):
        answer = call(server, path, body, timeout)
        asked = json.loads(json.dumps({"path": path, "request": body}))
        loads = (body or {}).get("method") == "grpo_kernels_load"
        seen = any(all(x[key] == value for key, value in asked.items()) for x in exchanges)
        if path != "/health" and not loads and not seen:
            text = json.dumps({**asked, "answer": answer})
            exchanges.append(json.loads(text.replace(config.model, "MODEL")))
        return answer

    Server._call = recorded
    rollout = rollout_of(config)
    rollout.update_weights()
    done = sample(rollout, sampling)
    sample(rollout, replace(sampling, temperature=0.0, record_support=False))
    texts = [rollout.tokenizer.decode(one.token_ids) for one in done]
    middle = {c for text in texts for c in text[1:-1] if c.isalnum() and c.isascii()}
    stop = max(sorted(middle), key=lambda c: sum(c in text for text in texts))
    if not sampling.record_support:
        sample(rollout, replace(sampling, stop=(stop,)))
    Server._call = call
    return exchanges


def main():
    import vllm

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = {"vllm_server_base_url": f"http://127.0.0.1:{port}", "vllm_server_timeout": 300.0}
    commands, exchanges = {}, []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_folder(model)
        for name, text in SHIM.items():
            Path(folder, name).write_text(text)
        search = os.pathsep.join([folder, os.getcwd()])
        for server, options, sampling, environment in (
            ("default", {}, SAMPLING, {}),
            ("masks", MASKS, MASKED, {"PYTHONPATH": search, "TRITON_INTERPRET": "1"}),
        ):
            config = config_for(model, **url, **options)
            command = [*server_command(config), "--served-model-name", "tiny"]
            if environment:
                command[command.index("--worker-extension-cls") + 1] = "interpreted.WorkerExtension"
            with serving(command, environment):
                exchanges += ({"server": server, **one} for one in record(config, sampling))
            text = " ".join(command).replace(str(model), "MODEL").replace(f" {port}", " PORT")
            commands[server] = text.replace(sys.executable, "python")
    about = "Answers of vLLM's servers to this library: tests/helpers/record_vllm.py"
    header = {"about": about, "vllm": vllm.__version__, "commands": commands}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in exchanges)
    RECORDING.write_text(f'{{"header":{json.dumps(header)},\n"exchanges":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
