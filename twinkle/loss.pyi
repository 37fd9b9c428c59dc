from typing import Any

from twinkle_core.contracts.loss import Loss as Loss
from twinkle_core.losses.bnpo import BNPOLoss as BNPOLoss
from twinkle_core.losses.chunked_cross_entropy import ChunkedCrossEntropyLoss as ChunkedCrossEntropyLoss
from twinkle_core.losses.cispo import CISPOLoss as CISPOLoss
from twinkle_core.losses.cpo import CPOLoss as CPOLoss
from twinkle_core.losses.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from twinkle_core.losses.dpo import DPOLoss as DPOLoss
from twinkle_core.losses.dr_grpo import DrGRPOLoss as DrGRPOLoss
from twinkle_core.losses.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss
from twinkle_core.losses.gkd import GKDLoss as GKDLoss
from twinkle_core.losses.grpo import GRPOLoss as GRPOLoss
from twinkle_core.losses.gspo import GSPOLoss as GSPOLoss
from twinkle_core.losses.infonce import InfoNCELoss as InfoNCELoss
from twinkle_core.losses.mse import MSELoss as MSELoss
from twinkle_core.losses.orpo import ORPOLoss as ORPOLoss
from twinkle_core.losses.ppo import PPOLoss as PPOLoss
from twinkle_core.losses.sapo import SAPOLoss as SAPOLoss
from twinkle_core.losses.simpo import SimPOLoss as SimPOLoss
from twinkle_core.types import LossOutput as LossOutput

def __getattr__(name: str) -> Any: ...  # classes of other distributions
