#!/bin/sh
# Fetch Llama 2 weights with the signed link that Meta mails to everyone who has accepted its licence
# (https://www.llama.com/llama-downloads/). Asks for the link and for the models, then fills the current folder:
#
#   tokenizer.model  tokenizer_checklist.chk
#   llama-2-7b/      consolidated.00.pth  params.json  checklist.chk       and so on, one folder a model
#
# A run that was cut continues where it stopped; files that are complete are checked and kept. The link is as good as
# a password until it expires: no message holds it, and curl or wget read it from standard input, where no list of
# processes shows it.
#
# LLAMA_DOWNLOAD_BASE (default https://download.llamameta.net) is the scheme and host that the link must name: set it
# to use a mirror; the tests set it to a server of their own.

set -u
LC_ALL=C
export LC_ALL
base=${LLAMA_DOWNLOAD_BASE:-https://download.llamameta.net}
base=${base%/}
all_models="7B 13B 70B 7B-chat 13B-chat 70B-chat"
tmp='' pid=''

die() {
    printf 'download.sh: %s\n' "$*" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

# ---------------------------------------------------------------- what this machine has

check_tools() {
    missing=''
    for tool in cat cut grep head mkdir mktemp mv rm sed sleep tail tr wc; do
        have "$tool" || missing="$missing $tool"
    done
    if have curl; then
        client=curl
    elif have wget && wget --version 2>/dev/null | head -n 1 | grep -q 'GNU Wget'; then
        client=wget
    else
        missing="$missing curl-or-GNU-wget"
    fi
    have md5sum || have md5 || missing="$missing md5sum-or-md5"
    [ -z "$missing" ] || die "this machine lacks:$missing. Install what is named, then run this again."
    [ -w . ] || die "the current folder is not writable: change to one that is, with room for the weights (13 GB to 140 GB a model)."
}

md5_of() { # Linux has md5sum, macOS has md5
    if have md5sum; then md5sum <"$1" | cut -c1-32; else md5 -q "$1"; fi
}

size_of() {
    if [ -f "$1" ]; then wc -c <"$1" | tr -d ' '; else echo 0; fi
}

# ---------------------------------------------------------------- what the user is asked

ask_url() {
    printf 'The link from the e-mail: '
    url=''
    IFS= read -r url || [ -n "$url" ] || die "no link was given."
    url=$(printf '%s' "$url" | sed 's/^[[:space:]]*//; s/[[:space:]]*$//')
    form="$base/*?Policy=...&Signature=...&Key-Pair-Id=..."
    case $url in
        '') die "no link was given." ;;
        "$base"/\*\?*) ;;
        *) die "this is not the link from the e-mail, which has the form $form (with the asterisk): copy its text rather than what it points to." ;;
    esac
    query=${url#"$base"/\*}
    case $query in
        *[!A-Za-z0-9.~_=\&%?+/:,-]*) die "the link holds a character that no such link has (a space, a quote, a line break?): copy it again. Its form is $form" ;;
    esac
    for part in Policy Signature Key-Pair-Id; do
        case "&${query#\?}&" in
            *"&$part="[!\&]*) ;;
            *) die "the link is cut short: it has no $part. Its form is $form" ;;
        esac
    done
}

ask_models() {
    printf 'Models, with commas between (%s; Enter for all): ' "$(echo "$all_models" | tr ' ' ',')"
    wanted=''
    IFS= read -r wanted || :
    printf '\n'
    models=''
    set -f # an asterisk in the answer is no list of files
    for word in $(printf '%s' "$wanted" | tr ',;[:upper:]' '  [:lower:]'); do
        found=''
        for model in $all_models; do
            [ "$word" = "$(printf '%s' "$model" | tr '[:upper:]' '[:lower:]')" ] && found=$model
        done
        [ -n "$found" ] || die "there is no model '$word'; there are: $all_models"
        models="$models $found"
    done
    set +f
    [ -n "$models" ] || models=$all_models
}

# ---------------------------------------------------------------- one transfer

# Each is run in the background and replaced by the client, so that its process can be ended; the link comes in
# through standard input. Neither follows a redirect. The client's own words go to a file nobody is shown, since they
# may hold the link.

run_curl() { # path, file
    exec curl -q --silent --show-error --fail --globoff --proto "=${base%%:*}" --continue-at - --output "$2" \
        --connect-timeout 30 --speed-limit 1 --speed-time 60 --write-out 'HTTP/1 %{http_code}\n' --config - \
        >"$tmp/status" 2>"$tmp/log" <<END
url = "$base/$1$query"
END
}

run_wget() { # path, file
    exec wget --no-config --quiet --server-response --continue --output-document="$2" --max-redirect=0 --tries=1 \
        --timeout=60 --input-file=- 2>"$tmp/status" >"$tmp/log" <<END
$base/$1$query
END
}

show_progress() { # file: how much of it there is, while the transfer runs and somebody watches
    [ -t 2 ] || return 0
    while kill -0 "$pid" 2>/dev/null; do
        printf '\r  %s MB ' "$(($(size_of "$1") / 1000000))" >&2
        sleep 1
    done
    printf '\r                \r' >&2
}

# Sets `code` (the client's exit status) and `status` (the last HTTP status, or empty where no answer came).
transfer() { # path, file
    "run_$client" "$1" "$2" &
    pid=$!
    case $1 in *.pth) show_progress "$2" ;; esac
    wait "$pid"
    code=$?
    pid=''
    status=$(sed -n 's/^ *HTTP\/[0-9.]* \([1-9][0-9][0-9]\).*/\1/p' "$tmp/status" | tail -n 1)
}

# A part that seems to be of no use stays until what comes in its place is seen to be the file: a network that wants a
# sign-in answers anything with its own page.
set_aside() { mv -f "$1" "$1.kept"; }

give_back() { if [ -f "$1.kept" ]; then mv -f "$1.kept" "$1"; fi; }

refuse_status() { # path, file, size before
    if [ "$3" -eq 0 ] || [ "$(size_of "$2")" -ne "$3" ]; then rm -f "$2"; fi # keep what was there, no body of an error
    give_back "$2"
    case $status in
        3??) why="the server points elsewhere, and this script follows no redirect" ;;
        401 | 403) why="the link has expired (it is good for a day) or does not cover this model: ask Meta for a new one" ;;
        404) why="the server has no such file" ;;
        *) why="try again later" ;;
    esac
    die "$1: HTTP status $status: $why."
}

# Fetches one file into FILE, continuing what is there; tries again as long as each try brings something, and of 20
# tries in a row one brings a megabyte.
fetch_part() { # path, file
    small=0
    while :; do
        before=$(size_of "$2")
        transfer "$1" "$2"
        if [ "$status" = 416 ] && [ "$before" -gt 0 ]; then return; fi # nothing is left: the checksum decides
        case $status in
            '' | 200 | 206) ;;
            *) refuse_status "$1" "$2" "$before" ;;
        esac
        [ "$code" -ne 0 ] || return 0
        after=$(size_of "$2")
        if [ "$client" = curl ] && [ "$code" -eq 33 ] && [ "$before" -gt 0 ]; then
            echo "  the server cannot continue $1: starting over"
            set_aside "$2"
        elif [ "$after" -gt "$before" ] && [ "$small" -lt 20 ]; then
            if [ "$((after - before))" -lt 1000000 ]; then small=$((small + 1)); else small=0; fi
            echo "  the transfer was cut at $after bytes: going on from there"
            sleep 1
        else
            die "$1: no answer from ${base#*://} or a broken transfer ($client ended with status $code, HTTP status ${status:-none}). Run this again to go on."
        fi
    done
}

# ---------------------------------------------------------------- is it the file?

looks_right() { # path, file
    case $1 in
        *.chk) grep -q '^[0-9a-fA-F]\{32\} ' "$2" && ! tr -d '\r' <"$2" | grep -v '^[0-9a-fA-F]\{32\} ' | grep -q . ;;
        *.json) head -c 100 "$2" | tr -d '[:space:]' | grep -q '^{' ;;
        *.pth) [ "$(head -c 2 "$2")" = PK ] ;; # what torch.save writes is a zip file
        *) [ -s "$2" ] && ! head -c 100 "$2" | tr -d '[:space:]\000' | grep -q '^[<{]' ;;
    esac
}

expected_md5() { # name, checklist
    tr -d '\r' <"$2" | sed -n "s/^\([0-9a-fA-F]\{32\}\) [ *]*$1\$/\1/p" | tr '[:upper:]' '[:lower:]' | head -n 1
}

verified() { # name, file, checklist: a file without a sum (params.json, on some lists) is held to its form alone
    sum=$(expected_md5 "$1" "$3")
    if [ -z "$sum" ]; then
        case $1 in *.json) looks_right "$1" "$2" && return ;; esac
        die "$3 has no checksum of $1: remove both and run this again."
    fi
    [ "$(md5_of "$2")" = "$sum" ]
}

need_place() { # path: a folder there would swallow the file
    for place in "$1" "$1.part" "$1.part.kept"; do
        [ ! -e "$place" ] || [ -f "$place" ] || die "$place is in the way: it is a folder or a device, no file. Move it, then run this again."
    done
}

fetch_checklist() { # path: small, and always fetched anew
    need_place "$1"
    rm -f "$1.part"
    fetch_part "$1" "$1.part"
    require_form "$1"
    mv -f "$1.part" "$1"
}

require_form() { # path
    looks_right "$1" "$1.part" && return
    rm -f "$1.part"
    give_back "$1.part"
    die "$1: HTTP status ${status:-none}, but what came is another thing than this file (a web page of your network?)."
}

fetch() { # path, checklist
    name=${1##*/}
    need_place "$1"
    if [ -f "$1.part.kept" ]; then # the last run was stopped while it started over
        if [ -f "$1.part" ] && looks_right "$1" "$1.part"; then rm -f "$1.part.kept"; else give_back "$1.part"; fi
    fi
    if [ -f "$1" ]; then
        if verified "$name" "$1" "$2"; then
            echo "$1: complete"
            return
        fi
        echo "$1: incomplete or damaged, fetching what is missing"
        if looks_right "$1" "$1"; then mv -f "$1" "$1.part"; else rm -f "$1"; fi
    else
        echo "$1: fetching"
    fi
    continued=$(size_of "$1.part")
    fetch_part "$1" "$1.part"
    require_form "$1"
    if ! verified "$name" "$1.part" "$2"; then
        [ "$continued" -gt 0 ] || { rm -f "$1.part"; die "$1: the checksum is wrong: the file was damaged on its way and is removed. Run this again."; }
        set_aside "$1.part"
        echo "  the checksum is wrong: starting over"
        fetch_part "$1" "$1.part"
        require_form "$1"
        verified "$name" "$1.part" "$2" || { rm -f "$1.part" "$1.part.kept"; die "$1: the checksum is wrong again: the file is removed. Run this again later."; }
    fi
    mv -f "$1.part" "$1"
    rm -f "$1.part.kept"
}

fetch_model() { # such as 7B-chat
    case $1 in
        7B*) last=0 ;;
        13B*) last=1 ;;
        70B*) last=7 ;;
    esac
    folder=llama-2-$(printf '%s' "$1" | tr '[:upper:]' '[:lower:]')
    mkdir -p "$folder" || die "cannot make the folder $folder"
    fetch_checklist "$folder/checklist.chk"
    fetch "$folder/params.json" "$folder/checklist.chk"
    shard=0
    while [ "$shard" -le "$last" ]; do
        fetch "$folder/consolidated.0$shard.pth" "$folder/checklist.chk"
        shard=$((shard + 1))
    done
}

# ---------------------------------------------------------------- in order

clean_up() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null
    [ -z "$tmp" ] || rm -rf "$tmp"
}

check_tools
ask_url
ask_models
trap clean_up EXIT
trap 'echo "download.sh: stopped; run it again to go on." >&2; exit 130' HUP INT TERM
tmp=$(mktemp -d) || die "cannot make a temporary folder"
fetch_checklist tokenizer_checklist.chk
fetch tokenizer.model tokenizer_checklist.chk
for model in $models; do
    fetch_model "$model"
done
echo "Done: every file is complete and its checksum right."
