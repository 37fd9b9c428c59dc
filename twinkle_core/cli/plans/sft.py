"""Supervised fine-tuning: conversations, of which the assistant's turns are trained."""

from __future__ import annotations

from twinkle_core.cli.plans.base import Task

TASK = Task()
