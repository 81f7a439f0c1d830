"""Examples of commands, one line that can be typed at the end of their `--help`, where the text has none."""

from __future__ import annotations

LINK = "p2pdiloco:1s3cc..."
EXAMPLES = {
    "run new": "run new shakespeare --preset small --admission invite",
    "run check": "run check run.toml",
    "run link": "run link shakespeare --qr-file shakespeare.svg",
    "run amend": "run amend shakespeare --pause --message 'back on monday'",
    "plan": "plan run.toml --upload 20Mbit",
    "bootstrap": "bootstrap --run run.toml --listen /ip4/0.0.0.0/tcp/31337",
    "node": f"node {LINK} --name anna --max-upload 20Mbit",
    "join": f"join {LINK}",
    "status": f"status --join {LINK}",
    "demo": "demo --nodes 3 --seconds 60",
    "chaos": "chaos --nodes 5 --minutes 10 --out chaos",
    "simulate": "simulate --seeds 100",
    "invite": "invite shakespeare --uses 5 --expires 7d --name anna --link",
    "ban": "ban shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "unban": "unban shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "revoke": "revoke shakespeare anna",
    "admit": "admit shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "dismiss": "dismiss shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "vouch": "vouch shakespeare",
    "can-join": f"can-join {LINK}",
    "export": f"export --join {LINK} --out my-model",
    "generate": f"generate --join {LINK} --prompt 'To be'",
    "eval": f"eval --join {LINK}",
    "checkpoint": f"checkpoint --join {LINK} --out theta.safetensors",
}
"""Commands by what is typed after `p2pdiloco`."""
COMPLETION = (
    '\b\nWords are completed by TAB, in bash, after\n  eval "$(_P2PDILOCO_COMPLETE=bash_source p2pdiloco)"'
)


def example(path: str) -> str:
    """Word the end of a command's help."""
    return f"\b\nExample:\n  p2pdiloco {EXAMPLES[path]}"
