from typing import Any

from torch.optim import ASGD as ASGD
from torch.optim import SGD as SGD
from torch.optim import Adadelta as Adadelta
from torch.optim import Adafactor as Adafactor
from torch.optim import Adagrad as Adagrad
from torch.optim import Adam as Adam
from torch.optim import Adamax as Adamax
from torch.optim import AdamW as AdamW
from torch.optim import NAdam as NAdam
from torch.optim import RAdam as RAdam
from torch.optim import RMSprop as RMSprop
from torch.optim import Rprop as Rprop

def __getattr__(name: str) -> Any: ...  # classes of other distributions
