"""Several threads on one `LLM` get the answers that one thread gets; a second thread in a lane is refused."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

import pytest
import torch

from sightline import LLM, RequestOutput, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.calls import TextStream
from sightline.core.errors import DeviceFaultError, EngineClosedError, LaneBusyError, RequestError
from sightline.core.turns import CHECK_SECONDS, Turn, Turns
from sightline.llm import EngineSettings, TokensPrompt
from sightline.testing.bench import Row
from sightline.testing.steps import Step
from support import attention_cases as cases
from support.attention_cases import FULL
from support.embedding_folder import WORDS, save_embedder
from support.engines import is_at_rest
from support.one_layer import check_forward
from support.tiny_models import make_model, random_prompts

_T = TypeVar("_T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
pytestmark = pytest.mark.timeout(120)
