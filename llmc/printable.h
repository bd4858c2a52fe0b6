// What the user typed, fit for a message of one line.
#pragma once

#include <string>

namespace llmc {

// Control characters become '?', an empty text becomes ''.
inline std::string printable(std::string text) {
    if (text.empty()) return "''";
    for (char& c : text) {
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    }
    return text;
}

}  // namespace llmc
