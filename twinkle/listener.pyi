from twinkle_core.hookspecs import hookimpl as hookimpl
from twinkle_core.listeners.jsonl import JsonLinesWriter as JsonLinesWriter
from twinkle_core.listeners.progress import ProgressBar as ProgressBar
from twinkle_core.plugins import listening as listening
