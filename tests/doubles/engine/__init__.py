"""A protocol-true stand-in for one vLLM server: HTTP API, KV events and metrics, no model.

``EngineDouble`` runs inside an asyncio test or as ``python -m tests.doubles.engine``.
Everything a client or an agent can see on the wire follows captures of vLLM 0.32
(``tests/data/vllm``); generated text is made up from the prompt's hash.
"""

from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.faults import Faults
from tests.doubles.engine.server import EngineDouble

__all__ = ["EngineDouble", "EngineDoubleConfig", "Faults"]
