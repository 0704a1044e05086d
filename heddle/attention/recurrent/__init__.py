"""Layers that keep a state of fixed size: gated delta, Mamba-2, lightning attention.

Per head, each token changes the state `X [K, V]` by an affine map and reads it:

    X_t = exp(g_t) * (I - b_t k_t k_t^T) X_(t-1) + b_t k_t v_t^T          gated delta
    X_t = exp(g_t) * X_(t-1) + k_t v_t^T                                  Mamba-2, lightning
    y_t = q_t^T X_t

So any run of tokens is one map `X -> Phi X + Psi`, which makes segments of a sequence independent:
each is run from zero wherever its rows are, and the maps put the states together afterwards.
"""
