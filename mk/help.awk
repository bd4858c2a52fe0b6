# Prints the targets and variables of a Makefile that have a "## " line above them.
/^## / { text = substr($0, 4); next }
text != "" && /^[A-Z_]+ *\?=/ {
    name = $1
    value = $0
    sub(/^[^=]*= */, "", value)
    variables[++v] = sprintf("  %-20s %s%s", name, text, value == "" ? "" : " (default: " value ")")
}
text != "" && /^[a-z][a-z0-9_-]*:/ {
    name = $0
    sub(/:.*/, "", name)
    targets[++t] = sprintf("  %-20s %s", name, text)
}
{ text = "" }
END {
    print "make TARGET [VARIABLE=value ...]\n\nTargets"
    for (i = 1; i <= t; ++i) print targets[i]
    print "\nVariables"
    for (i = 1; i <= v; ++i) print variables[i]
}
