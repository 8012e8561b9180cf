// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/session.hpp"
#include "engine/model/step_plan.hpp"

#include <cstdint>

namespace engine {

/// Takes the decisions of a prompt whose rows have all been through all layers, in a session that was made
/// with `decide_at_end`: the layers after each selecting one give up what it drops, in the ledger and in the
/// cache. Time to read the prompt is not saved; memory, and time of later tokens, is.
///
/// Each selecting layer decides as it does on the way, by its last n queries, over the keys of the rows that
/// the selecting layers before it kept; but queries and keys are those of a dense pass. Tokens that were
/// generated meanwhile stay. Pages of a paged store that are needed no more are left to
/// drop_ledger::hand_back_pages(); pages that others share must have been copied.
/// @param prompt  the whole of it as one span: id, tokens, options, forced and logits_rows are read
/// Throws `error` where the session isn't made for it or there are queries of another prompt's length.
template <class Ops>
void decide_at_end(basic_session<Ops>& session, const planned_request& prompt);

} // namespace engine
