"""Models of transformers with lintra's attention, and transformers' encoders as lintra's own.

attention: `attn_implementation="lintra"` and `"lintra-<mechanism>"`. masking: the mask that it needs.
cache: states in place of keys and values. pretrained: weights of Longformer, BigBird and Nystromformer.
`lintra.hf` exports the functions. This is not a stand-in: it needs transformers installed.
"""
