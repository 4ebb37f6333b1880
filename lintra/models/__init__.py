"""Whole networks. One file, one kind of network: the name of a file is its kind in a checkpoint."""

from lintra.models.bilstm import BiLSTM
from lintra.models.ctc import CTC
from lintra.models.decoder import Decoder, DecoderState
from lintra.models.encoder import Encoder
from lintra.models.forecaster import Forecaster
from lintra.models.seq2seq import Seq2Seq

__all__ = ["CTC", "BiLSTM", "Decoder", "DecoderState", "Encoder", "Forecaster", "Model", "Seq2Seq"]

Model = Decoder | Encoder | BiLSTM | CTC | Forecaster  # a Seq2Seq is a Decoder
