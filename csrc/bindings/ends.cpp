// The two ends of a model: the input stage, and the top-k of a user.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "bindings/checks.h"
#include "cpu/embedding.h"
#include "cpu/top_items.h"

namespace {

using namespace mtserve::bindings;
using mtserve::EmbeddingTerm;

void check_table(const Tensor& table, ScalarType dtype, int64_t width) {
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                    "tables must be float32 or bfloat16");
    STD_TORCH_CHECK(table.dim() == 2, "a table must be two-dimensional");
    check_matrix(table, dtype, table.size(0), width, "a table");
}

// Every record names rows that the term's table has.
void check_rows(const Tensor& records, const EmbeddingTerm& term, const Tensor& table) {
    const auto* values = values_of<int64_t>(records);
    for (int64_t record = 0; record < records.size(0); ++record) {
        const int64_t row = values[record * records.size(1) + term.column];
        STD_TORCH_CHECK(row < table.size(0), "record ", record, " names row ", row,
                        " of a table with ", table.size(0));
    }
}

void embed(Tensor records, std::vector<Tensor> tables, std::vector<int64_t> columns,
           std::vector<int64_t> num_dense, std::vector<int64_t> offsets, int64_t num_scaled,
           double scale, Tensor out) {
    check_matrix(records, ScalarType::Long, records.size(0), -1, "records");
    check_matrix(out, out.scalar_type(), records.size(0), -1, "out");
    const auto count = static_cast<int64_t>(tables.size());
    STD_TORCH_CHECK(columns.size() == tables.size() && num_dense.size() == tables.size() &&
                        offsets.size() == tables.size() && num_scaled >= 0 && num_scaled <= count,
                    "every table needs a column, a number of dense columns and an offset");
    std::vector<EmbeddingTerm> terms;
    for (int64_t i = 0; i < count; ++i) {
        const Tensor& table = tables[i];
        check_table(table, out.scalar_type(), -1);
        const EmbeddingTerm term{table.const_data_ptr(), table.size(1), columns[i], num_dense[i],
                                 offsets[i]};
        const int64_t num_columns = term.num_dense == 0 ? 1 : term.num_dense;
        STD_TORCH_CHECK(
            num_columns > 0 && term.column >= 0 && term.column <= records.size(1) - num_columns,
            "records have ", records.size(1), " columns, not ", num_columns, " from ", term.column,
            " on");
        STD_TORCH_CHECK(term.offset >= 0 && term.offset <= out.size(1) - term.width,
                        "a table of width ", term.width, " does not fit out at ", term.offset);
        STD_TORCH_CHECK(i < num_scaled || term.num_dense == 0,
                        "dense columns stand among the scaled terms");
        if (term.num_dense == 0) {
            check_rows(records, term, table);
        } else {
            STD_TORCH_CHECK(table.size(0) == term.num_dense, "a dense table has ", table.size(0),
                            " rows for ", term.num_dense, " columns");
        }
        terms.push_back(term);
    }
    mtserve::embed_rows({values_of<int64_t>(records), records.size(1), terms.data(), count,
                         num_scaled, static_cast<float>(scale), out.size(1),
                         out.scalar_type() == ScalarType::BFloat16, out.mutable_data_ptr()},
                        records.size(0));
}

void top_items(Tensor user, Tensor items, std::optional<Tensor> norms, Tensor item_ids,
               Tensor excluded, Tensor ids, Tensor scores, Tensor count) {
    check_vector(user, ScalarType::Float, "user");
    check_table(items, items.scalar_type(), user.numel());
    check_vector(item_ids, ScalarType::Long, "item_ids");
    check_length(item_ids, items.size(0), "item_ids");
    check_vector(excluded, ScalarType::Long, "excluded");
    check_vector(ids, ScalarType::Long, "ids");
    check_vector(scores, ScalarType::Float, "scores");
    check_length(scores, ids.numel(), "scores");
    check_vector(count, ScalarType::Long, "count");
    check_length(count, 1, "count");
    mtserve::TopArgs args;
    args.table = {items.const_data_ptr(), items.size(0), items.size(1),
                  items.scalar_type() == ScalarType::BFloat16, nullptr};
    if (norms) {
        check_vector(*norms, ScalarType::Float, "norms");
        check_length(*norms, items.size(0), "norms");
        args.table.norms = values_of<float>(*norms);
    }
    args.item_ids = values_of<int64_t>(item_ids);
    args.user = values_of<float>(user);
    args.excluded = values_of<int64_t>(excluded);
    args.num_excluded = excluded.numel();
    args.top_k = ids.numel();
    args.ids = mutable_values_of<int64_t>(ids);
    args.scores = mutable_values_of<float>(scores);
    *mutable_values_of<int64_t>(count) = mtserve::top_items(args);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(engine, library) {
    library.def(
        "embed(Tensor records, Tensor[] tables, int[] columns, int[] num_dense, int[] offsets, "
        "int num_scaled, float scale, Tensor(a!) out) -> ()");
    library.def(
        "top_items(Tensor user, Tensor items, Tensor? norms, Tensor item_ids, Tensor excluded, "
        "Tensor(a!) ids, Tensor(b!) scores, Tensor(c!) count) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(engine, CPU, library) {
    library.impl("embed", TORCH_BOX(&embed));
    library.impl("top_items", TORCH_BOX(&top_items));
}
