// linear_attention: plan linear, k = 4, v = 4, f = 4.
// Arrays: n chunks, g = batch * heads, t tokens of a chunk, s the same with the window's in front; N, G and LT are how many.
// Every head is a loop over chunks. The members of a team share its steps: part(size, member, members) is where a share begins.
// What a head keeps for itself lies in `mine`, `room` is for product, which adds A[m, k] B[k, n] to C[m, n] or writes it there:
// product(M, N, K, A, its strides, B, its strides, C, its strides, whether to add, room).
#include "functions.h"
#include "solve.h"
#include "tables.h"
#include "team.h"


static void chunks_head(
    const real* const* in, real* const* out, long N, long G, long LT, long g,
    real* mine, real* room, Team& team, long member) {
    const long members = team.members;
    real* const own = room + product_room();
    const real* const q = in[0] + g * (4 * LT);
    const real* const keys = in[1] + g * (4 * LT);
    const real* const values = in[2] + g * (4 * LT);
    const real* const W = in[3] + g * 16;
    real* const y_out = out[0] + g * (4 * LT);
    real* const W_out = out[1] + g * 16;
    if (member == 0 % members) {
        for (long v = 0; v < 4; ++v) {
            IVDEP for (long f = 0; f < 4; ++f) {
                W_out[v * 4 + f] = W[f + v * 4];
            }
        }
    }
    team.wait();
    // along n: W
    for (long n_step = 0; n_step < N; ++n_step) {
        const long n = n_step;
        const real* const q_2 = q + n * (4 * LT * G);
        const real* const keys_2 = keys + n * (4 * LT * G);
        const real* const values_2 = values + n * (4 * LT * G);
        real* const y = y_out + n * (4 * LT * G);
        // neg [g, s, v]
        real* const neg = own + 0;
        for (long s = 0; s < LT; ++s) {
            const real tril = (s <= (LT - 1) ? real(1.0) : real(0));
            IVDEP for (long v_2 = 0; v_2 < 4; ++v_2) {
                neg[s * 4 + v_2] = (-((-tril) * values_2[v_2 + s * 4]));
            }
        }
        // einsum [g, t, s]
        real* const einsum = mine + 0;
        product((exact_part(LT, member + 1, members) - exact_part(LT, member, members)), LT, 4, q_2 + exact_part(LT, member, members) * 4, 4, 1, keys_2, 1, 4, einsum + exact_part(LT, member, members) * 64, 64, 1, 0, room);
        // neg [g, t, s]
        real* const neg_2 = own + 256;
        team.wait();
        for (long t = 0; t < LT; ++t) {
            IVDEP for (long s_2 = 0; s_2 < LT; ++s_2) {
                neg_2[t * 64 + s_2] = (-(einsum[t * 64 + s_2] * (-(s_2 <= t ? real(1.0) : real(0)))));
            }
        }
        // y [g, t, v]
        if (member == 1 % members) {
            product(4, LT, 4, W_out, 4, 1, q_2, 1, 4, y, 1, 4, 0, room);
            product(LT, 4, LT, neg_2, 64, 1, values_2, 4, 1, y, 4, 1, 1, room);
        }
        // W_next [g, v, f]
        team.wait();
        if (member == 2 % members) {
            for (long v_3 = 0; v_3 < 4; ++v_3) {
                IVDEP for (long f_2 = 0; f_2 < 4; ++f_2) {
                    W_out[v_3 * 4 + f_2] = W_out[v_3 * 4 + f_2];
                }
            }
            product(4, 4, LT, neg, 1, 4, keys_2, 4, 1, W_out, 4, 1, 1, room);
        }
        team.wait();
    }
}

extern "C" int chunks(const real* const* in, real* const* out, long N, long G, long LT, long threads) {
    return for_heads(G, threads, 4096, product_room() + 4352,
        [=](long g, real* mine, real* room, Team& team, long member) {
            chunks_head(in, out, N, G, LT, g, mine, room, team, member);
        });
}

static void chunks_saving_head(
    const real* const* in, real* const* out, long N, long G, long LT, long g,
    real* mine, real* room, Team& team, long member) {
    const long members = team.members;
    real* const own = room + product_room();
    const real* const q = in[0] + g * (4 * LT);
    const real* const keys = in[1] + g * (4 * LT);
    const real* const values = in[2] + g * (4 * LT);
    const real* const W = in[3] + g * 16;
    real* const y_out = out[0] + g * (4 * LT);
    real* const W_out = out[1] + g * 16;
    real* const saved_0_out = out[2] + g * 16;
    if (member == 0 % members) {
        for (long v = 0; v < 4; ++v) {
            IVDEP for (long f = 0; f < 4; ++f) {
                saved_0_out[f + v * 4] = W[f + v * 4];
            }
        }
    }
    team.wait();
    // along n: W
    for (long n_step = 0; n_step < N; ++n_step) {
        const long n = n_step;
        const real* const q_2 = q + n * (4 * LT * G);
        const real* const keys_2 = keys + n * (4 * LT * G);
        const real* const values_2 = values + n * (4 * LT * G);
        const real* const W_2 = saved_0_out + n * (16 * G);
        real* const W_next = n_step + 1 < N ? saved_0_out + (n + 1) * (16 * G) : W_out;
        real* const y = y_out + n * (4 * LT * G);
        // neg [g, s, v]
        real* const neg = own + 0;
        for (long s = 0; s < LT; ++s) {
            const real tril = (s <= (LT - 1) ? real(1.0) : real(0));
            IVDEP for (long v_2 = 0; v_2 < 4; ++v_2) {
                neg[s * 4 + v_2] = (-((-tril) * values_2[v_2 + s * 4]));
            }
        }
        // W_next [g, v, f]
        if (member == 1 % members) {
            for (long v_3 = 0; v_3 < 4; ++v_3) {
                IVDEP for (long f_2 = 0; f_2 < 4; ++f_2) {
                    W_next[f_2 + v_3 * 4] = W_2[f_2 + v_3 * 4];
                }
            }
            product(4, 4, LT, neg, 1, 4, keys_2, 4, 1, W_next, 4, 1, 1, room);
        }
        // einsum [g, t, s]
        real* const einsum = mine + 0;
        product((exact_part(LT, member + 1, members) - exact_part(LT, member, members)), LT, 4, q_2 + exact_part(LT, member, members) * 4, 4, 1, keys_2, 1, 4, einsum + exact_part(LT, member, members) * 64, 64, 1, 0, room);
        // neg [g, t, s]
        real* const neg_2 = own + 0;
        team.wait();
        for (long t = 0; t < LT; ++t) {
            IVDEP for (long s_2 = 0; s_2 < LT; ++s_2) {
                neg_2[t * 64 + s_2] = (-(einsum[t * 64 + s_2] * (-(s_2 <= t ? real(1.0) : real(0)))));
            }
        }
        // y [g, t, v]
        if (member == 2 % members) {
            product(4, LT, 4, W_2, 4, 1, q_2, 1, 4, y, 1, 4, 0, room);
            product(LT, 4, LT, neg_2, 64, 1, values_2, 4, 1, y, 4, 1, 1, room);
        }
        team.wait();
    }
}

extern "C" int chunks_saving(const real* const* in, real* const* out, long N, long G, long LT, long threads) {
    return for_heads(G, threads, 4096, product_room() + 4096,
        [=](long g, real* mine, real* room, Team& team, long member) {
            chunks_saving_head(in, out, N, G, LT, g, mine, room, team, member);
        });
}

static void chunks_backward_head(
    const real* const* in, real* const* out, long N, long G, long LT, long g,
    real* mine, real* room, Team& team, long member) {
    const long members = team.members;
    real* const own = room + product_room();
    const real* const q = in[0] + g * (4 * LT);
    const real* const keys = in[1] + g * (4 * LT);
    const real* const values = in[2] + g * (4 * LT);
    const real* const saved_0 = in[3] + g * 16;
    const real* const grad_y = in[4] + g * (4 * LT);
    const real* const grad_W = in[5] + g * 16;
    real* const q_out = out[0] + g * (4 * LT);
    real* const keys_out = out[1] + g * (4 * LT);
    real* const values_out = out[2] + g * (4 * LT);
    real* const W_out = out[3] + g * 16;
    if (member == 0 % members) {
        for (long v = 0; v < 4; ++v) {
            IVDEP for (long f = 0; f < 4; ++f) {
                W_out[v * 4 + f] = grad_W[f + v * 4];
            }
        }
    }
    team.wait();
    // backwards along n: grad_W
    for (long n_step = 0; n_step < N; ++n_step) {
        const long n = N - 1 - n_step;
        const real* const W = saved_0 + n * (16 * G);
        const real* const q_2 = q + n * (4 * LT * G);
        const real* const keys_2 = keys + n * (4 * LT * G);
        const real* const values_2 = values + n * (4 * LT * G);
        const real* const grad_out0 = grad_y + n * (4 * LT * G);
        real* const kept = q_out + n * (4 * LT * G);
        real* const kept_2 = keys_out + n * (4 * LT * G);
        real* const kept_3 = values_out + n * (4 * LT * G);
        // einsum [g, t, s]
        real* const einsum = mine + 0;
        product((exact_part(LT, member + 1, members) - exact_part(LT, member, members)), LT, 4, grad_out0 + exact_part(LT, member, members) * 4, 4, 1, values_2, 1, 4, einsum + exact_part(LT, member, members) * 64, 64, 1, 0, room);
        // mul [g, t, s]
        real* const mul = own + 0;
        team.wait();
        for (long t = 0; t < LT; ++t) {
            IVDEP for (long s = 0; s < LT; ++s) {
                mul[t * 64 + s] = (einsum[t * 64 + s] * (-(s <= t ? real(1.0) : real(0))));
            }
        }
        // neg [g, t, s]
        real* const neg = own + 4096;
        for (long t_2 = 0; t_2 < LT; ++t_2) {
            IVDEP for (long s_2 = 0; s_2 < LT; ++s_2) {
                neg[t_2 * 64 + s_2] = (-mul[t_2 * 64 + s_2]);
            }
        }
        // add [g, t, f]
        if (member == 1 % members) {
            product(LT, 4, 4, grad_out0, 4, 1, W, 4, 1, kept, 4, 1, 0, room);
            product(LT, 4, LT, neg, 64, 1, keys_2, 4, 1, kept, 4, 1, 1, room);
        }
        // einsum [g, s, f]
        real* const einsum_2 = own + 4096;
        product(LT, 4, LT, mul, 1, 64, q_2, 4, 1, einsum_2, 4, 1, 0, room);
        // neg [g, s, v]
        real* const neg_2 = own + 0;
        for (long s_3 = 0; s_3 < LT; ++s_3) {
            const real tril = (s_3 <= (LT - 1) ? real(1.0) : real(0));
            IVDEP for (long v_2 = 0; v_2 < 4; ++v_2) {
                neg_2[s_3 * 4 + v_2] = (-((-tril) * values_2[v_2 + s_3 * 4]));
            }
        }
        // add [g, s, f]
        if (member == 2 % members) {
            for (long s_4 = 0; s_4 < LT; ++s_4) {
                IVDEP for (long f_2 = 0; f_2 < 4; ++f_2) {
                    kept_2[f_2 + s_4 * 4] = (-einsum_2[s_4 * 4 + f_2]);
                }
            }
            product(4, LT, 4, W_out, 1, 4, neg_2, 1, 4, kept_2, 1, 4, 1, room);
        }
        // einsum [g, t, s]
        real* const einsum_3 = mine + 0;
        team.wait();
        product((exact_part(LT, member + 1, members) - exact_part(LT, member, members)), LT, 4, q_2 + exact_part(LT, member, members) * 4, 4, 1, keys_2, 1, 4, einsum_3 + exact_part(LT, member, members) * 64, 64, 1, 0, room);
        // mul [g, t, s]
        real* const mul_2 = own + 0;
        team.wait();
        for (long t_3 = 0; t_3 < LT; ++t_3) {
            IVDEP for (long s_5 = 0; s_5 < LT; ++s_5) {
                mul_2[t_3 * 64 + s_5] = (einsum_3[t_3 * 64 + s_5] * (-(s_5 <= t_3 ? real(1.0) : real(0))));
            }
        }
        // einsum [g, s, v]
        real* const einsum_4 = own + 4096;
        product(4, LT, LT, grad_out0, 1, 4, mul_2, 64, 1, einsum_4, 1, 4, 0, room);
        // einsum [g, s, v]
        real* const einsum_5 = own + 0;
        product(4, LT, 4, W_out, 4, 1, keys_2, 1, 4, einsum_5, 1, 4, 0, room);
        // add [g, v, f]
        team.wait();
        if (member == 3 % members) {
            for (long v_3 = 0; v_3 < 4; ++v_3) {
                IVDEP for (long f_3 = 0; f_3 < 4; ++f_3) {
                    W_out[v_3 * 4 + f_3] = W_out[v_3 * 4 + f_3];
                }
            }
            product(4, 4, LT, grad_out0, 1, 4, q_2, 4, 1, W_out, 4, 1, 1, room);
        }
        // sub [g, s, v]
        if (member == 4 % members) {
            for (long s_6 = 0; s_6 < LT; ++s_6) {
                const real tril_2 = (s_6 <= (LT - 1) ? real(1.0) : real(0));
                IVDEP for (long v_4 = 0; v_4 < 4; ++v_4) {
                    kept_3[v_4 + s_6 * 4] = ((-einsum_4[s_6 * 4 + v_4]) - (einsum_5[s_6 * 4 + v_4] * (-tril_2)));
                }
            }
        }
        team.wait();
    }
}

extern "C" int chunks_backward(const real* const* in, real* const* out, long N, long G, long LT, long threads) {
    return for_heads(G, threads, 4096, product_room() + 8192,
        [=](long g, real* mine, real* room, Team& team, long member) {
            chunks_backward_head(in, out, N, G, LT, g, mine, room, team, member);
        });
}

static void chunks_thin_head(
    const real* const* in, real* const* out, long N, long G, long LT, long g,
    real* mine, real* room, Team& team, long member) {
    const long members = team.members;
    real* const own = room + product_room();
    const real* const q = in[0] + g * (4 * LT);
    const real* const keys = in[1] + g * (4 * LT);
    const real* const values = in[2] + g * (4 * LT);
    const real* const W = in[3] + g * 16;
    real* const y_out = out[0] + g * (4 * LT);
    real* const W_out = out[1] + g * 16;
    if (member == 0 % members) {
        for (long v = 0; v < 4; ++v) {
            IVDEP for (long f = 0; f < 4; ++f) {
                W_out[v * 4 + f] = W[f + v * 4];
            }
        }
    }
    team.wait();
    // along n: W
    for (long n_step = 0; n_step < N; ++n_step) {
        const long n = n_step;
        const real* const q_2 = q + n * (4 * LT * G);
        const real* const keys_2 = keys + n * (4 * LT * G);
        const real* const values_2 = values + n * (4 * LT * G);
        real* const y = y_out + n * (4 * LT * G);
        // neg [g, s, v]
        real* const neg = own + 0;
        for (long s = 0; s < LT; ++s) {
            const real tril = (s <= (LT - 1) ? real(1.0) : real(0));
            IVDEP for (long v_2 = 0; v_2 < 4; ++v_2) {
                neg[s * 4 + v_2] = (-((-tril) * values_2[v_2 + s * 4]));
            }
        }
        // einsum [g, t, s]
        real* const einsum = mine + 0;
        product((exact_part(LT, member + 1, members) - exact_part(LT, member, members)), LT, 4, q_2 + exact_part(LT, member, members) * 4, 4, 1, keys_2, 1, 4, einsum + exact_part(LT, member, members) * 64, 64, 1, 0, room);
        // neg [g, t, s]
        real* const neg_2 = own + 256;
        team.wait();
        for (long t = 0; t < LT; ++t) {
            IVDEP for (long s_2 = 0; s_2 < LT; ++s_2) {
                neg_2[t * 64 + s_2] = (-(einsum[t * 64 + s_2] * (-(s_2 <= t ? real(1.0) : real(0)))));
            }
        }
        // y [g, t, v]
        if (member == 1 % members) {
            product(4, LT, 4, W_out, 4, 1, q_2, 1, 4, y, 1, 4, 0, room);
            product(LT, 4, LT, neg_2, 64, 1, values_2, 4, 1, y, 4, 1, 1, room);
        }
        // W_next [g, v, f]
        team.wait();
        if (member == 2 % members) {
            for (long v_3 = 0; v_3 < 4; ++v_3) {
                IVDEP for (long f_2 = 0; f_2 < 4; ++f_2) {
                    W_out[v_3 * 4 + f_2] = W_out[v_3 * 4 + f_2];
                }
            }
            product(4, 4, LT, neg, 1, 4, keys_2, 4, 1, W_out, 4, 1, 1, room);
        }
        team.wait();
    }
}

extern "C" int chunks_thin(const real* const* in, real* const* out, long N, long G, long LT, long threads) {
    return for_heads(G, threads, 4096, product_room() + 4352,
        [=](long g, real* mine, real* room, Team& team, long member) {
            chunks_thin_head(in, out, N, G, LT, g, mine, room, team, member);
        });
}

static void chunks_states_head(
    const real* const* in, real* const* out, long N, long G, long LT, long g,
    real* mine, real* room, Team& team, long member) {
    const long members = team.members;
    real* const own = room + product_room();
    const real* const q = in[0] + g * (4 * LT);
    const real* const keys = in[1] + g * (4 * LT);
    const real* const values = in[2] + g * (4 * LT);
    const real* const W = in[3] + g * 16;
    real* const saved_0_out = out[0] + g * 16;
    if (member == 0 % members) {
        for (long v = 0; v < 4; ++v) {
            IVDEP for (long f = 0; f < 4; ++f) {
                saved_0_out[f + v * 4] = W[f + v * 4];
            }
        }
    }
    team.wait();
    // along n: W
    for (long n_step = 0; n_step < N - 1; ++n_step) {
        const long n = n_step;
        const real* const q_2 = q + n * (4 * LT * G);
        const real* const keys_2 = keys + n * (4 * LT * G);
        const real* const values_2 = values + n * (4 * LT * G);
        const real* const W_2 = saved_0_out + n * (16 * G);
        real* const W_next = saved_0_out + (n + 1) * (16 * G);
        // neg [g, s, v]
        real* const neg = own + 0;
        for (long s = 0; s < LT; ++s) {
            const real tril = (s <= (LT - 1) ? real(1.0) : real(0));
            IVDEP for (long v_2 = 0; v_2 < 4; ++v_2) {
                neg[s * 4 + v_2] = (-((-tril) * values_2[v_2 + s * 4]));
            }
        }
        // W_next [g, v, f]
        if (member == 1 % members) {
            for (long v_3 = 0; v_3 < 4; ++v_3) {
                IVDEP for (long f_2 = 0; f_2 < 4; ++f_2) {
                    W_next[f_2 + v_3 * 4] = W_2[f_2 + v_3 * 4];
                }
            }
            product(4, 4, LT, neg, 1, 4, keys_2, 4, 1, W_next, 4, 1, 1, room);
        }
        team.wait();
    }
}

extern "C" int chunks_states(const real* const* in, real* const* out, long N, long G, long LT, long threads) {
    return for_heads(G, threads, 0, product_room() + 256,
        [=](long g, real* mine, real* room, Team& team, long member) {
            chunks_states_head(in, out, N, G, LT, g, mine, room, team, member);
        });
}

