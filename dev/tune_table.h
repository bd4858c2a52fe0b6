// What `make tune` decides and writes, as far as it needs no GPU: which of the measured algorithms a
// product takes, and the text of the table.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/error.h"
#include "llmc/matmul_table.h"

namespace llmc::tuning {

// An algorithm that was measured for a product.
struct Measured {
    double microseconds;
    bool right;        // the right numbers, the same bits in every run
    bool rounds_once;  // false: the product is rounded before the old gradient is added to it
    bool first;        // the heuristic's first
};

// Times that differ by less are the same.
constexpr double kTie = 0.01;

// Which of them to take: of those that are right and within kTie of the fastest, one that rounds
// once, then the heuristic's first, then the fastest. Nothing when none is right.
inline std::optional<size_t> choose(const std::vector<Measured>& measured) {
    double fastest = 0.0;
    for (const Measured& m : measured) {
        if (m.right && (fastest == 0.0 || m.microseconds < fastest)) fastest = m.microseconds;
    }
    const auto rank = [](const Measured& m) {
        return std::tuple(!m.rounds_once, !m.first, m.microseconds);
    };
    std::optional<size_t> best;
    for (size_t i = 0; i < measured.size(); ++i) {
        if (!measured[i].right || measured[i].microseconds > fastest * (1.0 + kTie)) continue;
        if (!best || rank(measured[i]) < rank(measured[*best])) best = i;
    }
    return best;
}

// The order of the table: GPU, library, product by type and sizes.
inline bool row_before(const TunedProduct& a, const TunedProduct& b) {
    const auto place = [](const TunedProduct& row) {
        const std::optional<matmul_detail::ProductKey> key = parse_product(row.product);
        if (!key) throw Error("not the name of a product: " + row.product);
        return std::pair(std::tuple(row.gpu, row.library), *key);
    };
    return place(a) < place(b);
}

// Puts `row` into the table, in the place of an older one for the same product.
inline void insert_row(std::vector<TunedProduct>& rows, const TunedProduct& row) {
    const auto place = std::lower_bound(rows.begin(), rows.end(), row, row_before);
    if (place != rows.end() && !row_before(row, *place)) {
        *place = row;
    } else {
        rows.insert(place, row);
    }
}

// The text of llmc/matmul_algorithms.inc.
inline std::string table_text(const std::vector<TunedProduct>& rows) {
    std::string text =
        "// Written by `make tune`; see llmc/matmul_table.h. GPU, version of cuBLASLt, product,\n"
        "// algorithm, bytes of workspace, microseconds, microseconds of the heuristic's first.\n";
    for (const TunedProduct& row : rows) {
        text +=
            format("{\"%s\", %zu, \"%s\",\n {", row.gpu.c_str(), row.library, row.product.c_str());
        for (size_t i = 0; i < row.algorithm.size(); ++i) {
            if (i > 0) text += i == 4 ? ",\n  " : ", ";
            text += format("0x%llx", static_cast<unsigned long long>(row.algorithm[i]));
        }
        text += format("},\n %zu, %.1f, %.1f},\n", row.workspace, row.microseconds,
                       row.first_microseconds);
    }
    return text;
}

}  // namespace llmc::tuning
