from typing import Any

from twinkle_core.data.preference import PreferenceProcessor as PreferenceProcessor
from twinkle_core.data.preprocessors import AlpacaProcessor as AlpacaProcessor
from twinkle_core.data.preprocessors import MessagesProcessor as MessagesProcessor
from twinkle_core.data.preprocessors import SelfCognitionProcessor as SelfCognitionProcessor
from twinkle_core.data.preprocessors import ShareGPTProcessor as ShareGPTProcessor
from twinkle_core.data.triplets import TripletProcessor as TripletProcessor

def __getattr__(name: str) -> Any: ...  # classes of other distributions
